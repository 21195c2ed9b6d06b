"""RLlib DQN (new API stack) on CartPole-v1: seconds to the first update, environment steps/s, samples trained/s.

    python benchmarks/peers/rllib_dqn.py --seconds 30

Double and dueling Q-learning, 3-step returns, prioritized replay of 50,000 steps, batches of 64, a 128-128 network with
linear dueling heads, 2 runners of 8 environments. The learner is in the driver's process (num_learners=0), with one
torch thread. Both rates are counted outside RLlib's own metrics: steps added to the replay buffer, and updates returned
times the batch size, over whole calls of train(). The last line printed is a JSON object.

--fragment  environment steps of each environment in a round of sampling. RLlib alternates: a round of sampling in all
            runners, then updates, then the weights are sent. Its automatic value ("auto", here 4) makes rounds so short
            that remote calls dominate; 64, the default, is nearly twice as fast, for weights that are sent once in about
            1,000 environment steps. Longer rounds bring no clear gain.
--ratio     samples trained for each environment step. 1, the default, is RLlib's own at --fragment auto. More gives
            more samples and fewer steps a second.
--vectorize "sync" or "vector_entry_point" (CartPole batched in numpy).
"""

from __future__ import annotations

from cartpoles import process_age, start_ray  # isort: skip (it sets variables that Ray reads)

import argparse
import json
import time
from typing import Any

import ray
import torch
from ray.rllib.algorithms.dqn import DQN, DQNConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig


def make_config(args: argparse.Namespace) -> DQNConfig:
    """The benchmark's settings as an RLlib configuration."""
    # RLlib counts one runner more than there is when it turns the intensity into updates a round.
    intensity = args.ratio * args.runners / (args.runners + 1)
    return (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=args.runners,
            num_envs_per_env_runner=args.envs,
            rollout_fragment_length=args.fragment,
            gym_env_vectorize_mode=args.vectorize,
        )
        .learners(num_learners=0)
        .training(
            lr=args.lr,
            train_batch_size_per_learner=args.batch,
            n_step=3,
            double_q=True,
            dueling=True,
            training_intensity=intensity,
            num_steps_sampled_before_learning_starts=args.learning_starts,
            replay_buffer_config={
                "type": "PrioritizedEpisodeReplayBuffer",
                "capacity": 50_000,
                "alpha": 0.6,
                "beta": 0.4,
            },
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[128, 128], fcnet_activation="relu"))
        .fault_tolerance(restart_failed_env_runners=False)
        .debugging(log_level="ERROR", seed=args.seed)
    )


class Updates:
    """Counts an algorithm's calls of its learner's update, and remembers when the first one had returned."""

    def __init__(self, algorithm: DQN) -> None:
        self.count = 0
        self.first: float | None = None
        self._update = algorithm.learner_group.update
        algorithm.learner_group.update = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._update(*args, **kwargs)
        if self.first is None:
            self.first = process_age()
        self.count += 1
        return result


def fragment(text: str) -> int | str:
    """A number of steps, or "auto"."""
    return text if text == "auto" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the measured stretch")
    parser.add_argument("--warmup", type=float, default=5.0, help="seconds of learning before it")
    parser.add_argument("--runners", type=int, default=2, help="processes that step environments")
    parser.add_argument("--envs", type=int, default=8, help="environments in each")
    parser.add_argument("--batch", type=int, default=64, help="samples in an update")
    parser.add_argument("--fragment", type=fragment, default=64, help="steps of each environment in a round, or auto")
    parser.add_argument("--ratio", type=float, default=1.0, help="samples trained for each environment step")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate; 5e-4 is RLlib's own")
    parser.add_argument("--learning-starts", type=int, default=1_000, help="environment steps before the first update")
    parser.add_argument("--vectorize", choices=("sync", "vector_entry_point"), default="sync")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start_ray(args.runners)
    algorithm = make_config(args).build_algo()
    built = process_age()
    updates = Updates(algorithm)
    buffer = algorithm.local_replay_buffer
    while updates.first is None:
        algorithm.train()
    warm = time.perf_counter() + args.warmup
    while time.perf_counter() < warm:
        algorithm.train()
    began, steps, count = time.perf_counter(), buffer.get_added_timesteps(), updates.count
    while time.perf_counter() < began + args.seconds:
        last = algorithm.train()
    took = time.perf_counter() - began
    result = {
        "ray": ray.__version__,
        "first_update_seconds": round(updates.first, 3),
        "built_seconds": round(built, 3),
        "env_steps_per_second": round((buffer.get_added_timesteps() - steps) / took, 1),
        "samples_trained_per_second": round((updates.count - count) * args.batch / took, 1),
        "measured_seconds": round(took, 3),
        "total_env_steps": buffer.get_added_timesteps(),
        "total_updates": updates.count,
        "episode_return_mean": round(float(last["env_runners"]["episode_return_mean"]), 2),
        "settings": vars(args),
    }
    algorithm.stop()
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
