"""RLlib IMPALA (new API stack) on CartPole-v1: seconds to the first update, environment steps/s, seconds to a return.

    python benchmarks/peers/rllib_impala.py --seconds 30
    python benchmarks/peers/rllib_impala.py --fragment 20 --until 475 --seconds 120

A 64-64 network that policy and value share, 2 runners of 8 environments, V-trace with RLlib's own thresholds, its tuned
value loss of 0.05 and gradients clipped to a norm of 40. An update takes one round of one runner. The last line printed is
a JSON object. All steps are counted outside RLlib's own metrics, by the learner: those of the episodes that it was given
(env_steps), and of them those whose update is done (trained).

--until     Stop as soon as 20 greedy episodes average this return, or after --seconds from process start. They are played
            once a second, in the driver, with the learner's present weights, in one batched environment; until_seconds is
            from process start, without the time that these evaluations took. Without --until the rates are measured for
            --seconds after --warmup, and the evaluation comes at the end alone.

Ray makes its workers nice (15), so that whatever else runs goes first; here they are not.

docs/results/impala.md has what was tried, and why these are the defaults.
"""

from __future__ import annotations

import os

os.environ.setdefault("RAY_worker_niceness", "0")

from cartpoles import CartPoles, process_age, start_ray  # isort: skip (it sets variables that Ray reads)

import argparse
import json
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.rllib.algorithms.impala import IMPALA, IMPALAConfig
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

ITERATION_S = 1.0  # of one call of train()


class Counts(NamedTuple):
    received: int  # environment steps that the learner received
    trained: int  # of them, in finished updates
    updates: int
    first: float | None  # time.time() when the first update was done


class CountingLearner(IMPALATorchLearner):
    """Counts the steps of the episodes that it receives, and those in finished updates."""

    def build(self) -> None:
        self.counts = Counts(0, 0, 0, None)
        self.waiting: deque[int] = deque()  # steps of unfinished updates
        super().build()

    def _make_batch_if_necessary(self, training_data: Any) -> Any:
        if training_data.episodes is not None:
            steps = sum(map(len, training_data.episodes))
            self.counts = self.counts._replace(received=self.counts.received + steps)
            self.waiting.append(steps)
        return super()._make_batch_if_necessary(training_data)

    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        received, trained, updates, first = self.counts
        self.counts = Counts(received, trained + self.waiting.popleft(), updates + 1, first or time.time())


def counted(algorithm: IMPALA) -> Counts:
    (found,) = algorithm.learner_group.foreach_learner(lambda learner: learner.counts)
    return found.get() if hasattr(found, "get") else found


class Evaluation(CartPoles):
    """Greedy episodes, with the learner's present weights."""

    def __init__(self, algorithm: IMPALA, seed: int) -> None:
        super().__init__(seed)
        self.algorithm = algorithm
        self.module = algorithm.env_runner.module  # the driver's own, which does not sample

    @torch.no_grad()
    def present(self) -> float:
        began = time.perf_counter()
        self.module.set_state(self.algorithm.learner_group.get_weights()[DEFAULT_MODULE_ID])
        self.seconds += time.perf_counter() - began
        return self.play(self._act)

    def _act(self, obs: np.ndarray) -> np.ndarray:
        logits = self.module.forward_inference({"obs": torch.from_numpy(obs)})["action_dist_inputs"]
        return logits.argmax(1).numpy()


def make_config(args: argparse.Namespace) -> IMPALAConfig:
    """The benchmark's settings as an RLlib configuration."""
    return (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=args.runners,
            num_envs_per_env_runner=args.envs,
            rollout_fragment_length=args.fragment,
            gym_env_vectorize_mode=args.vectorize,
            max_requests_in_flight_per_env_runner=args.in_flight,
        )
        .learners(num_learners=args.learners, learner_class=CountingLearner)
        .training(
            lr=args.lr,
            train_batch_size_per_learner=args.batch or args.envs * args.fragment,
            grad_clip=40.0,
            grad_clip_by="global_norm",
            vf_loss_coeff=args.vf_coeff,
            entropy_coeff=args.entropy,
            timeout_s_sampler_manager=args.wait,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=[args.hidden, args.hidden], fcnet_activation="tanh", vf_share_layers=True
            )
        )
        .reporting(min_time_s_per_iteration=ITERATION_S)
        .fault_tolerance(restart_failed_env_runners=False)
        .debugging(log_level="ERROR", seed=args.seed)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the measured stretch; with --until, of all")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds of learning before it; with --until none")
    parser.add_argument("--until", type=float, default=None, help="stop at this return of 20 greedy episodes")
    parser.add_argument("--runners", type=int, default=2, help="processes that step environments")
    parser.add_argument("--envs", type=int, default=8, help="environments in each")
    parser.add_argument("--fragment", type=int, default=100, help="steps of each environment in a round of sampling")
    parser.add_argument("--batch", type=int, default=0, help="steps in an update, whole rounds; 0: one round of one runner")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate; 5e-4 is RLlib's own")
    parser.add_argument("--entropy", type=float, default=0.01, help="weight of the entropy; 0.01 is RLlib's own")
    parser.add_argument("--vf-coeff", type=float, default=0.05, help="weight of the value loss; 0.5 is RLlib's own")
    parser.add_argument("--hidden", type=int, default=64, help="units of each of the two layers")
    parser.add_argument("--learners", type=int, choices=(0, 1), default=0, help="0: in the driver; 1: a process of its own")
    parser.add_argument("--wait", type=float, default=0.02, help="seconds that the driver waits for samples at once")
    parser.add_argument("--in-flight", type=int, default=1, help="rounds that a runner may be asked for at once")
    parser.add_argument("--vectorize", choices=("sync", "vector_entry_point"), default="vector_entry_point")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start_ray(args.runners + args.learners)
    algorithm = make_config(args).build_algo()
    built = process_age()
    evaluation = Evaluation(algorithm, args.seed + 10_000)
    while (first := counted(algorithm).first) is None:
        algorithm.train()
    first -= time.time() - process_age()
    reached, last, began = None, {}, time.perf_counter()
    if args.until is None:
        while time.perf_counter() < began + args.warmup:
            algorithm.train()
        began, before = time.perf_counter(), counted(algorithm)
        while time.perf_counter() < began + args.seconds:
            last = algorithm.train()
        took, after = time.perf_counter() - began, counted(algorithm)
        final = evaluation.present()
    else:
        before, final = counted(algorithm), evaluation.present()
        while final < args.until and process_age() - evaluation.seconds < args.seconds:
            last = algorithm.train()
            final = evaluation.present()
        took, after = time.perf_counter() - began - evaluation.seconds, counted(algorithm)
        reached = round(process_age() - evaluation.seconds, 3) if final >= args.until else None
    result = {
        "ray": ray.__version__,
        "first_update_seconds": round(first, 3),
        "built_seconds": round(built, 3),
        "env_steps_per_second": round((after.received - before.received) / took, 1),
        "env_steps_trained_per_second": round((after.trained - before.trained) / took, 1),
        "updates_per_second": round((after.updates - before.updates) / took, 2),
        "until_seconds": reached,
        "greedy_return": round(final, 2),
        "episode_return_mean": round(float(last.get("env_runners", {}).get("episode_return_mean", np.nan)), 2),
        "measured_seconds": round(took, 3),
        "eval_seconds": round(evaluation.seconds, 3),
        "total_env_steps": after.received,
        "total_updates": after.updates,
        "settings": vars(args),
    }
    algorithm.stop()
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
