"""DQN on CartPole against Stable-Baselines3: env steps a second at equal network, batch and updates per step."""

import dataclasses
import time
from typing import Any

import torch

from veldt.bench.timing import machine, take_turns
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.runtime import Inline
from veldt.topologies import make_program

HIDDEN, BATCH, START, LR, TARGET = (64, 64), 64, 1_000, 1e-3, 250


@dataclasses.dataclass(frozen=True)
class DqnBench:
    """DQN on CartPole against Stable-Baselines3, at equal updates per step and batch."""

    steps: int = 6_000
    """Env steps of one turn."""
    rounds: int = 5
    """Turns that each contender gets."""
    updates_per_step: float = 0.5
    """Gradient steps for each env step."""
    threads: int = 1
    """Threads for tensor operations, of both."""

    def run(self) -> dict[str, Any]:
        try:
            import stable_baselines3
        except ImportError:
            raise UserError("This compares with Stable-Baselines3; install it with: pip install 'veldt[bench]'.") from None
        torch.set_num_threads(self.threads)
        found = take_turns(self.rounds, {"veldt": self._ours, "sb3": self._theirs})
        names = ("env_steps_per_s", "updates_per_step")
        figures = {f"{who}_{name}": found[who][name] for name in names for who in found}
        figures["ours/theirs"] = figures["veldt_env_steps_per_s"] / figures["sb3_env_steps_per_s"]
        return {
            "machine": machine() | {"stable-baselines3": stable_baselines3.__version__},
            "results": {"cartpole, 64-64, batch 64": figures},
        }

    def _ours(self, seed: int) -> dict[str, float]:
        """Once learning has started."""
        settings: dict[str, Any] = {
            "algorithm.hidden": HIDDEN,
            "algorithm.double": False,
            "algorithm.dueling": False,
            "algorithm.n": 1,
            "store.selector": "uniform",
            "store.min_size": START,
            "store.samples_per_insert": self.updates_per_step * BATCH,
            "learner.batch": BATCH,
            "learner.lr": LR,
            "learner.target_every": TARGET,
            "eval.every": 0,
        }
        config = recipes.make("dqn", "CartPole-v1", steps=self.steps, seed=seed, **settings)
        began: list[tuple[float, int, int]] = []

        with Inline().start(make_program(config, config.env_spec())) as nodes:
            while (steps := nodes.count("env_steps")) < self.steps:
                if not began and steps >= 2 * START:
                    began.append((time.perf_counter(), steps, nodes.count("learner_steps")))
                nodes.step()
            began.append((time.perf_counter(), steps, nodes.count("learner_steps")))
        return _rates(began)

    def _theirs(self, seed: int) -> dict[str, float]:
        from stable_baselines3 import DQN
        from stable_baselines3.common.callbacks import BaseCallback

        began: list[tuple[float, int, int]] = []

        class Watch(BaseCallback):  # type: ignore[misc, unused-ignore]
            def _on_step(self) -> bool:
                if self.n_calls == 2 * START:
                    began.append((time.perf_counter(), self.n_calls, self.model._n_updates))
                return True

        model = DQN(
            "MlpPolicy",
            "CartPole-v1",
            learning_rate=LR,
            batch_size=BATCH,
            learning_starts=START,
            train_freq=4,
            gradient_steps=round(4 * self.updates_per_step),
            target_update_interval=TARGET,
            buffer_size=50_000,
            policy_kwargs={"net_arch": list(HIDDEN)},
            seed=seed,
            device="cpu",
        )
        model.learn(self.steps, callback=Watch())
        began.append((time.perf_counter(), self.steps, model._n_updates))
        return _rates(began)


def _rates(marks: list[tuple[float, int, int]]) -> dict[str, float]:
    (t0, steps0, updates0), (t1, steps1, updates1) = marks
    steps = steps1 - steps0
    return {"env_steps_per_s": steps / (t1 - t0), "updates_per_step": (updates1 - updates0) / steps}
