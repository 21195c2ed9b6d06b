"""Latency of a Ray actor method call that takes a numpy array and returns it.

    python benchmarks/peers/ray_call.py

Times ray.get(actor.echo.remote(x)), one call at a time, for a small float32 and a larger uint8 batch of observations;
warm-up calls are not counted. The last line printed is a JSON object, times in microseconds.
"""

from __future__ import annotations

import os

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import json
import logging
from time import perf_counter_ns

import numpy as np
import ray


@ray.remote(num_cpus=1)
class Echo:
    """Returns its argument."""

    def echo(self, x: np.ndarray) -> np.ndarray:
        return x


def latency(actor: ray.actor.ActorHandle, x: np.ndarray, calls: int, warmup: int) -> dict[str, float | int]:
    """Percentiles of `calls` timed round trips."""
    for _ in range(warmup):
        ray.get(actor.echo.remote(x))
    times = np.empty(calls)
    for i in range(calls):
        began = perf_counter_ns()
        ray.get(actor.echo.remote(x))
        times[i] = perf_counter_ns() - began
    p50, p90, p99 = np.percentile(times / 1e3, (50, 90, 99)).round(1).tolist()
    return {"p50_us": p50, "p90_us": p90, "p99_us": p99, "calls": calls, "bytes": x.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2_000, help="timed calls with the small array")
    parser.add_argument("--large-calls", type=int, default=500, help="timed calls with the large array")
    parser.add_argument("--warmup", type=int, default=300, help="calls before those, for each array")
    args = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    actor = Echo.remote()
    rng = np.random.default_rng(0)
    small = rng.standard_normal((8, 4), dtype=np.float32)
    large = rng.integers(0, 256, (8, 84, 84), dtype=np.uint8)
    result = {
        "ray": ray.__version__,
        "float32[8,4]": latency(actor, small, args.calls, args.warmup),
        "uint8[8,84,84]": latency(actor, large, args.large_calls, args.warmup),
    }
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
