"""What only a GPU shows: updates as one CUDA graph are those without, a store on the GPU gives what one in RAM gives, and
how fast both are. Run it from the repository:

    python benchmarks/gpu_check.py            all, in about two minutes
    python benchmarks/gpu_check.py store rate  those whose names contain one of these words

Each check prints one line, `ok` or `FAILED` with its traceback. The last lines are rates.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from veldt.acting.policy import BatchedPolicy
from veldt.algorithms.dpg import DPG
from veldt.algorithms.dqn import DQN
from veldt.algorithms.r2d2 import R2D2
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.counters import Counters
from veldt.learning.learner import Learner, LearnerConfig
from veldt.learning.params import LatestParams
from veldt.records.block import Block, Schema, window_items
from veldt.records.step import EnvSpec
from veldt.records.tree import spec
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized

LIMIT = 115  # seconds; what has not begun by then is left out
VECTOR = EnvSpec("vector", {"obs": spec((4,), np.float32)}, spec((), np.int64), spaces.Discrete(3))
PIXELS = EnvSpec("pixels", {"obs": spec((84, 84), np.uint8)}, spec((), np.int64), spaces.Discrete(6))
BOX = EnvSpec("box", {"obs": spec((4,), np.float32)}, spec((2,), np.float32), spaces.Box(-2, 3, (2,)))
MULTI = EnvSpec("multi", {"obs": spec((4,), np.float32)}, spec((2,), np.int64), spaces.MultiDiscrete([3, 2]))
UPDATES = 50
CASES: dict[str, tuple[Any, EnvSpec, int]] = {
    "dqn mlp": (DQN(n=3, double=True, dueling=True, normalize_obs=True), VECTOR, 64),
    "dqn nature": (DQN(n=3, history=4, double=True, dueling=True), PIXELS, 32),
    "dpg": (DPG(n=3, critic=(64, 48), actor=(48, 32)), BOX, 64),
    "v-trace": (VTraceActorCritic(unroll=20, history=4), PIXELS, 4),
    "v-trace lstm": (VTraceActorCritic(unroll=10, lstm=32, normalize=True), MULTI, 16),
    "r2d2": (R2D2(burn_in=4, length=10, stride=5, n=3, lstm=32, head=16, hidden=(32,)), VECTOR, 16),
}
began = time.monotonic()


def random_block(schema: Schema, rng: np.random.Generator, ends: float) -> Block:
    rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
    columns = schema.layout.columns(rows)
    for x in (*columns.values(), *schema.start_layout.columns(starts).values()):
        if x.dtype == np.uint8:
            x[...] = rng.integers(0, 256, x.shape, np.uint8)
        else:
            x[...] = rng.normal(size=x.shape) if x.dtype.kind == "f" else rng.integers(0, 2, x.shape)
    if "logits" in columns:
        columns["logits"][...] = -rng.random(columns["logits"].shape)
    if "version" in columns:
        columns["version"][...] = 0
    columns["valid"][...] = rng.random(schema.rows) < 1 - ends / 10
    columns["last"][...] = rng.random(schema.rows) < ends
    columns["discount"][...] = ~columns["last"] | (rng.random(schema.rows) < 0.5)
    columns["first"][1:] = columns["last"][:-1]
    return Block(schema, rows, starts, window_items(columns["valid"], columns["last"], schema.window, schema.fresh))


def schema_of(algorithm: Any, env: EnvSpec, fresh: int) -> Schema:
    stride = algorithm.window.stride
    rows = {**env.step, "action": env.action, **algorithm.extras(env)}
    return Schema(rows, algorithm.window, max(1, fresh // stride) * stride, algorithm.state(env))


def store_of(algorithm: Any, env: EnvSpec, blocks: int, where: str, fresh: int = 32, ends: float = 0.05) -> Replay:
    schema, rng = schema_of(algorithm, env, fresh), np.random.default_rng(0)
    size = blocks * schema.starts
    how: dict[str, Any] = {"pinned": not where, "device": where, "seed": 1}
    store = Replay(schema, Prioritized(size), MinSize(1), size, blocks, **how)
    for _ in range(blocks):
        store.insert(random_block(schema, rng, ends), rng.random(schema.starts))
    return store


def learner_of(store: Any, algorithm: Any, env: EnvSpec, batch: int, **config: Any) -> Learner:
    settings = {"batch": batch, "lr": 1e-4, "eps": 1e-2, "target_every": 7, "publish_every": 5, "anneal": True} | config
    counters = Counters()
    counters.add("env_steps", 100)
    made = LearnerConfig(**settings)
    return Learner(algorithm, env, store, LatestParams(), counters, made, 10_000, seed=3, device="cuda")


def weights(learner: Learner) -> Tensor:
    """Without running averages, which may be much larger."""
    return learner.vector[: len(learner.flat.gradient)].cpu().clone()


def run(learner: Learner, updates: int) -> Tensor:
    for _ in range(updates):
        assert learner.step()
    learner.state()  # ends what is under way
    assert learner.steps == updates and learner.bad == 0, (learner.steps, learner.bad)
    return weights(learner)


def compare(one: Tensor, other: Tensor, start: Tensor) -> str:
    gap, moved = (float((other - x).norm() / x.norm()) for x in (one, start))
    assert np.isfinite(gap) and gap < 1e-5, f"the weights differ by {gap:.2e}; training moved them by {moved:.2e}"
    assert moved > 10 * gap, (moved, gap)
    return f"relative difference {gap:.1e} (training moved the weights by {moved:.1e})"


def graph_is_eager(name: str) -> str:
    algorithm, env, batch = CASES[name]
    eager = learner_of(store_of(algorithm, env, 60, ""), algorithm, env, batch, graph="off")
    graph = learner_of(store_of(algorithm, env, 60, ""), algorithm, env, batch)
    start = weights(eager)
    assert torch.equal(start, weights(graph))
    ours = run(graph, UPDATES)
    assert graph.captured is not None and graph.captured.columns is not None, "it was not captured"
    return compare(run(eager, UPDATES), ours, start)


def store_is_store(name: str) -> str:
    algorithm, env, _ = CASES[name]
    plain, ours = (store_of(algorithm, env, 20, where) for where in ("", "cuda"))
    rng, compared = np.random.default_rng(7), 0
    for _ in range(30):
        for _ in range(rng.integers(0, 4)):
            block = random_block(plain.schema, rng, 0.05)
            plain.insert(block, None), ours.insert(block, None)
        expected, found = plain.sample(33), ours.sample(33)
        assert expected is not None and found is not None
        assert (expected.keys == found.keys).all() and (expected.weights == found.weights).all()
        for mine, theirs in ((found.rows, expected.rows), (found.starts, expected.starts)):
            assert list(mine) == list(theirs)
            for key, x in mine.items():
                tensor: Any = x
                assert tensor.is_cuda and tensor.cpu().numpy().tobytes() == theirs[key].tobytes(), key
                compared += theirs[key].nbytes
    return f"{compared / 1e6:.1f} MB equal bit for bit"


def learner_on_gpu_store(name: str) -> str:
    algorithm, env, batch = CASES[name]
    host = learner_of(store_of(algorithm, env, 60, ""), algorithm, env, batch, prefetch=2)
    device = learner_of(store_of(algorithm, env, 60, "cuda"), algorithm, env, batch, prefetch=2)
    start = weights(host)
    return compare(run(host, UPDATES), run(device, UPDATES), start)


def skipped(name: str) -> str:
    """A batch that is not finite changes nothing, whether before or after the capture, and is counted later."""
    algorithm, env, batch = CASES[name]
    store = store_of(algorithm, env, 60, "cuda")
    learner, plain, drawn = learner_of(store, algorithm, env, batch), store.sample, 0

    def sample(n: int) -> Any:
        nonlocal drawn
        drawn += 1
        found: Any = plain(n)
        if drawn in (2, 20):
            found.rows["reward"].fill_(float("nan"))
        return found

    store.sample = sample  # type: ignore[method-assign]
    for number in range(1, 31):
        before = learner.state() if number in (2, 20) else {}
        before = {key: np.array(x) for key, x in before.items()}
        assert learner.step()
        if before:
            after = learner.state()
            for key, x in before.items():
                if key not in ("steps", "bad"):
                    np.testing.assert_array_equal(np.array(after[key]), x, err_msg=f"update {number}: {key}")
    learner.state()
    assert learner.bad == 2, learner.bad
    assert learner.vector.isfinite().all()
    return "weights, target and averages are unchanged by 2 bad updates of 30"


class Reading(nn.Module):
    """Its forward pass reads a value on the host, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.q(x)
        return out if x.sum().item() > 0 else out * 1.0


class ReadingDQN(DQN):
    def network(self, env: EnvSpec) -> nn.Module:
        return Reading()


def fallback(_: str) -> str:
    plain, env = DQN(n=3), VECTOR
    learner = learner_of(store_of(plain, env, 60, "cuda"), ReadingDQN(n=3), env, 32)
    other = learner_of(store_of(plain, env, 60, ""), ReadingDQN(n=3), env, 32, graph="off")
    start = weights(learner)
    found = compare(run(other, UPDATES), run(learner, UPDATES), start)
    assert learner.captured is None
    return f"a network that reads values goes on without a graph, {found}"


def resumed(name: str) -> str:
    """State is saved and loaded between replays."""
    algorithm, env, batch = CASES[name]
    one, other = (learner_of(store_of(algorithm, env, 60, "cuda"), algorithm, env, batch) for _ in range(2))
    start = weights(one)
    for _ in range(10):
        one.step(), other.step()
    one.cut(), other.cut()
    state = {key: np.array(x) if isinstance(x, np.ndarray) else x for key, x in one.state().items()}
    for _ in range(7):
        other.step()
    other.cut()
    other.load_state(state)
    other.store.rng = np.random.default_rng(5)  # type: ignore[attr-defined]
    one.store.rng = np.random.default_rng(5)  # type: ignore[attr-defined]
    other.store.selector.load(one.store.selector.save())  # type: ignore[attr-defined]
    for _ in range(10):
        one.step(), other.step()
    one.cut(), other.cut()
    return compare(weights(one), weights(other), start)


def short_run(recipe: str, **settings: Any) -> str:
    import veldt

    with tempfile.TemporaryDirectory() as folder:
        run = veldt.train(recipe, env="CartPole-v1", run=Path(folder) / "r", quiet=True, **settings)
        text = (Path(folder) / "r" / "log.txt").read_text()
        assert "no CUDA graph" not in text, text[-2000:]
        last = run.metrics[-1]
        return f"{last.get('learner_steps', 0):,.0f} updates, skipped {last.get('skipped_updates')}"


def policies(algorithm: Any, env: EnvSpec, groups: int, n: int) -> tuple[BatchedPolicy, BatchedPolicy]:
    """With graphs and without, of equal weights."""
    explore = np.linspace(0, 1, groups * n)
    how: dict[str, Any] = {"groups": groups, "n": n, "batch": groups * n, "wait": 0.0, "device": "cuda"}
    one, other = (
        BatchedPolicy(algorithm, env, LatestParams(), Counters(), explore, 1, **how, graph=graph) for graph in (True, False)
    )
    other.vector.copy_(one.vector)
    torch.cuda.synchronize()
    return one, other


def random_step(env: EnvSpec, n: int, rng: np.random.Generator) -> dict[str, Any]:
    obs = env.observation["obs"]
    return {
        "obs": (255 * rng.random((n, *obs.shape))).astype(obs.dtype),
        "reward": rng.random(n).astype(np.float32),
        "discount": np.ones(n, np.float32),
        "first": rng.random(n) < 0.1,
        "last": np.zeros(n, np.bool_),
        "valid": rng.random(n) < 0.95,
    }


def answer(policy: BatchedPolicy, steps: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    for group, step in steps.items():
        assert policy.send(group, step)
    found: dict[int, dict[str, Any]] = {}
    for _ in range(2):
        for group in steps:
            reply = policy.recv(group) if group not in found else None
            if reply is not None:
                found[group] = reply
    return found


def inference(name: str) -> str:
    algorithm, env, _ = CASES[name]
    one, other = policies(algorithm, env, 5, 6)
    rng, worst = np.random.default_rng(3), 0.0
    for number in range(40):
        groups = rng.permutation(5)[: rng.integers(1, 6)].tolist()
        if number % 7 == 6:
            one.reset(groups[0]), other.reset(groups[0])
        steps = {group: random_step(env, 6, rng) for group in groups}
        found, want = answer(one, steps), answer(other, steps)
        for group in groups:
            for key, x in want[group].items():
                worst = max(worst, float(np.abs(found[group][key].astype(np.float64) - x).max()))
    assert one.graphs is not None and any(x.graph is not None for x in one.graphs._passes.values()), "not captured"
    assert worst < 1e-3, worst
    return f"largest difference {worst:.1e}, sizes {sorted(one.graphs._passes)}"


def inference_rates(_: str) -> str:
    said = []
    for n in (32, 128, 256):
        times = []
        for policy in policies(NATURE, PIXELS, 1, n):
            step = random_step(PIXELS, n, np.random.default_rng(0))
            for _ in range(10):
                answer(policy, {0: step})
            start = time.perf_counter()
            for _ in range(200):
                answer(policy, {0: step})
            times.append(1000 * (time.perf_counter() - start) / 200)
        said.append(f"{n} environments {times[0]:.2f} ms, without graphs {times[1]:.2f} ms")
    return "; ".join(said)


# Rates


def rate(learner: Learner, seconds: float = 2.5) -> float:
    for _ in range(12):
        learner.step()
    learner.state()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        learner.step()
        count += 1
    learner.state()
    return count / (time.perf_counter() - start)


def bare(learner: Learner) -> float:
    """Replays of the captured graph alone."""
    captured = learner.captured
    assert captured is not None and captured._graph is not None
    with captured.on_stream():
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(40):
                captured._graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 40)
    return 1000 / sorted(times)[2]


def host_share(learner: Learner, updates: int = 200) -> str:
    """Milliseconds of a step on the host by part; what waits for the GPU is in `wait`."""
    spent = {"sample": 0.0, "wait": 0.0, "all": 0.0}
    captured = learner.captured
    assert captured is not None
    plain = captured.launch

    def launch(*args: Any) -> Any:
        launched = plain(*args)
        wait = launched.wait

        def timed() -> Any:
            start = time.perf_counter()
            report = wait()
            spent["wait"] += time.perf_counter() - start
            return report

        launched.wait = timed
        return launched

    captured.launch = launch  # type: ignore[method-assign]
    learner.feed.timings["sample"] = 0.0
    for _ in range(updates):
        start = time.perf_counter()
        learner.step()
        spent["all"] += time.perf_counter() - start
    spent["sample"] = learner.feed.timings["sample"]
    captured.launch = plain  # type: ignore[method-assign]
    return ", ".join(f"{key} {1000 * x / updates:.2f} ms" for key, x in spent.items())


def rates(name: str, algorithm: Any, env: EnvSpec, batch: int, blocks: int, fresh: int, **config: Any) -> str:
    settings = {"target_every": 2_500, "publish_every": 10, "anneal": False, "lr": 6.25e-5} | config
    gpu = store_of(algorithm, env, blocks, "cuda", fresh, 0.002)
    learner = learner_of(gpu, algorithm, env, batch, **settings)
    ours = rate(learner)
    alone, host = bare(learner), host_share(learner, 50)
    del learner
    lines = [f"{name}: store on the GPU {ours:.0f}/s, bare graph {alone:.0f}/s, ratio {ours / alone:.2f}; host: {host}"]
    if time.monotonic() - began < LIMIT:
        eager = rate(learner_of(gpu, algorithm, env, batch, graph="off", **settings), 1.5)
        lines.append(f"    without a graph, store on the GPU {eager:.0f}/s")
    del gpu
    if time.monotonic() - began < LIMIT:
        ram = store_of(algorithm, env, blocks, "", fresh, 0.002)
        lines.append(f"    store in RAM {rate(learner_of(ram, algorithm, env, batch, **settings), 1.5):.0f}/s")
    return "\n".join(lines)


def tf32(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on
    torch.backends.cudnn.deterministic = not on


NATURE = DQN(n=3, history=4, double=True, dueling=True, gamma=0.99)
CHECKS: dict[str, Callable[[], str]] = {
    **{f"graph = eager: {name}": (lambda name=name: graph_is_eager(name)) for name in CASES},  # type: ignore[misc]
    **{f"store on the GPU = in RAM: {name}": (lambda name=name: store_is_store(name)) for name in CASES},  # type: ignore[misc]
    "learner on both stores: dqn nature": lambda: learner_on_gpu_store("dqn nature"),
    "learner on both stores: r2d2": lambda: learner_on_gpu_store("r2d2"),
    "skipped: dqn mlp": lambda: skipped("dqn mlp"),
    "skipped: v-trace lstm": lambda: skipped("v-trace lstm"),
    "resumed: dqn mlp": lambda: resumed("dqn mlp"),
    "fallback": lambda: fallback(""),
    "inference: dqn nature": lambda: inference("dqn nature"),
    "inference: r2d2": lambda: inference("r2d2"),
    "inference: v-trace lstm": lambda: inference("v-trace lstm"),
    "run inline: dqn": lambda: short_run("dqn", steps=3_000, **{"eval.every": 0}),
    "run in processes: apex-dqn": lambda: short_run("apex-dqn", steps=15_000, **{"eval.every": 0}),
}
RATES: dict[str, Callable[[], str]] = {
    "rate: dqn nature 512": lambda: rates("dqn nature 512", NATURE, PIXELS, 512, 300, 64),
    "rate: dqn nature 512 bfloat16": lambda: rates("dqn nature 512, bfloat16", NATURE, PIXELS, 512, 300, 64, bfloat16=True),
    "rate: inference, nature": lambda: inference_rates(""),
    "rate: v-trace 32 x 20": lambda: rates("v-trace 32 x 20", VTraceActorCritic(unroll=20, history=4), PIXELS, 32, 200, 20),
    "rate: r2d2 64 x (40 + 80 + 5) bfloat16": lambda: rates(
        "r2d2 64 x (40 + 80 + 5), bfloat16", R2D2(history=4), PIXELS, 64, 20, 320, bfloat16=True
    ),
}


def main(words: list[str]) -> int:
    logging.basicConfig(level=logging.WARNING, format="    log: %(message)s")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for name, check in (CHECKS | RATES).items():
        if words and not any(word in name for word in words):
            continue
        if time.monotonic() - began > LIMIT:
            print(f"left out {name}: no time", flush=True)
            continue
        tf32(name in RATES)
        start = time.monotonic()
        try:
            said = check()
            torch.cuda.synchronize()
            print(f"ok       {name}: {said} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED   {name}\n{traceback.format_exc()[-3000:]}", flush=True)
        torch.cuda.empty_cache()
    print(f"{failed} failed, {time.monotonic() - began:.0f} s in all", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
