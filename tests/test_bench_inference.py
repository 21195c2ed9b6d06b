"""The benchmark of inference: its clocks, its arithmetic, and a short run of it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from veldt.__main__ import main
from veldt.bench import latency
from veldt.bench.inference import PRICES, InferenceBench, make_table
from veldt.bench.latency import TimedPolicy, percentiles, thin
from veldt.bench.prices import Prices, cost, read_prices
from veldt.bench.window import TABLE
from veldt.compiled import LIGHT
from veldt.errors import UserError
from veldt.runtime.local import zygote


@pytest.fixture(autouse=True, scope="module")
def _tidy() -> Iterator[None]:
    yield
    zygote.discard()


class Scripted:
    """A policy whose every call takes as many microseconds on its own clock as it is told."""

    def __init__(self, takes: list[int]) -> None:
        self.takes, self.now = takes, 0
        self.refuses = self.late = False

    def perf_counter_ns(self) -> int:
        return self.now

    def send(self, group: int, step: Any) -> bool:
        self.now += 1000 * self.takes.pop(0)
        return not self.refuses

    def recv(self, group: int) -> Any:
        return None if self.late else {"action": group}

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    policy = Scripted([])
    monkeypatch.setattr(latency, "time", policy)
    return policy


def test_a_timed_policy_tells_the_calls_since_it_was_last_asked(scripted: Scripted) -> None:
    timed: Any = TimedPolicy(scripted)  # type: ignore[arg-type]
    order = np.random.default_rng(0).permutation(np.arange(1, 101)).tolist()
    scripted.takes = order + [7] * 20
    for _ in range(100):
        assert timed.send(3, {}) and timed.recv(3) == {"action": 3}
    found = timed.take()
    assert found == (100, sorted(map(float, order))) and percentiles([found]) == (50.0, 99.0)
    for _ in range(20):
        timed.send(0, {}), timed.recv(0)
    assert timed.take() == (20, [7.0] * 20)
    assert timed.take() == (0, [])


def test_a_call_begins_with_the_first_attempt_and_ends_with_the_actions(scripted: Scripted) -> None:
    timed: Any = TimedPolicy(scripted)  # type: ignore[arg-type]
    scripted.takes = [10, 20, 5, 40]
    scripted.refuses = True
    assert not timed.send(0, {})
    scripted.refuses, scripted.late = False, True
    assert timed.send(0, {}) and timed.recv(0) is None
    assert timed.send(1, {})
    scripted.late = False
    assert timed.recv(0) is not None and timed.recv(1) is not None
    assert timed.take() == (2, [5.0, 35.0])
    timed.send(0, {})
    timed.reset(0)  # a call that nobody waits for any more
    assert timed.take() == (0, [])


def test_percentiles_of_several_actors_count_every_call() -> None:
    rng = np.random.default_rng(1)
    sets = [(1000 * rng.lognormal(4, 1, n)).astype(int).tolist() for n in (30_000, 500, 4_000)]
    found = percentiles([(len(x), thin(x)) for x in sets])
    exact = 1e-3 * np.percentile(np.concatenate(sets), (50, 99))
    np.testing.assert_allclose(found, exact, rtol=0.02)
    assert all(len(thin(x)) <= latency.QUANTILES for x in sets)
    assert all(math.isnan(x) for x in percentiles([(0, [])]))


def test_the_clock_needs_neither_torch_nor_numba() -> None:
    code = "import sys, veldt.bench.latency; sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, LIGHT: "1"}, check=True, timeout=60)


def test_the_cost_is_that_of_the_whole_machine() -> None:
    prices = Prices("EUR", 0.05, {"H200": 4.0, "T4": 0.5})
    assert prices.hourly(16) == pytest.approx(0.8)
    assert prices.hourly(16, "NVIDIA H200") == pytest.approx(4.8)
    # 1e9 steps at 1e6 a second take 1000 s.
    assert cost(1e6, 3.6) == pytest.approx(1.0)
    assert cost(1e6, prices.hourly(16, "Tesla T4")) == pytest.approx(1000 / 3600 * 1.3)
    with pytest.raises(UserError, match="has no GPU whose name is in 'RTX'; it has H200, T4"):
        prices.hourly(16, "RTX")


def test_the_price_file_is_read_as_plain_data(tmp_path: Path) -> None:
    ours = read_prices(PRICES)
    assert ours.core_hour > 0 and ours.hourly(1, "NVIDIA H200") > ours.core_hour
    path = tmp_path / "prices.yaml"
    path.write_text("{currency: USD, core_hour: 1}")
    assert read_prices(path) == Prices("USD", 1.0, {})
    for text in ("", "currency: USD", "{currency: USD, core_hour: much}", "!!python/object:os.system {}", "[1"):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a price file"):
            read_prices(path)
    path.write_text("{currency: USD, core_hour: -1}")
    with pytest.raises(UserError, match="negative"):
        read_prices(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_prices(tmp_path / "none.yaml")


def test_networks_grow_with_the_width() -> None:
    bench = InferenceBench()
    assert [bench.config(width).algorithm.hidden for width in bench.widths] == [(64, 64), (256, 256), (1024, 1024)]
    atari = InferenceBench(env="ALE/Pong-v5")
    env = atari.config(1).envs().spec
    nets = [atari.config(width).algorithm.network(env) for width in atari.widths]
    assert [net.torso.last.out_features for net in nets] == [256, 1024, 4096]
    with pytest.raises(UserError, match="For Atari the widths are 1, 2, 4, 8, 16, not 3"):
        atari.config(3)
    assert eval(repr(atari)) == atari, "the loop's process is told what to run by this"


def test_a_machine_without_a_gpu_says_so() -> None:
    with pytest.raises(UserError, match="device 'tpu' is not available"):
        InferenceBench(device="tpu").run()


def test_a_short_bench_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--actors", "2", "--envs", "4", "--widths", "1", "--seconds", "0.3", "--rounds", "1", "--no-ratios"]
    assert main(["bench", "inference", *size, "--contenders", "local", "shm", "grpc-tcp", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    results, table = (json.loads(out[-1])[name] for name in ("results", "table"))
    assert table == out[-1 - len(table) : -1] and len(table) == 4
    lines = {name: results[f"mlp 64 x 64, {name}"] for name in ("local", "shm", "grpc-tcp")}
    for name, line in lines.items():
        assert list(line) == [*TABLE.values(), "USD_per_1e9_steps"]
        assert 0 < line["latency_p50_us"] <= line["latency_p99_us"] < 1e6, name
        assert line["env_steps_per_s"] > 100 and line["cpu_s_per_1e6_steps"] > 0 and line["USD_per_1e9_steps"] > 0
    assert lines["local"]["batch"] == 4 and lines["local"]["bytes_out_per_step"] == 0
    for name in ("shm", "grpc-tcp"):
        assert 2 <= lines[name]["batch"] <= 8
        assert lines[name]["latency_p50_us"] > lines["local"]["latency_p50_us"] / 4
    # Groups of two: an observation of 16 bytes, reward, discount and flags; then the number of the question.
    assert 16 + 12 < lines["shm"]["bytes_out_per_step"] < 60 and 8 < lines["shm"]["bytes_in_per_step"] < 30
    assert lines["grpc-tcp"]["bytes_out_per_step"] > lines["shm"]["bytes_out_per_step"]
    ratios = results["central / local, env steps a second"]
    expected = lines["shm"]["env_steps_per_s"] / lines["local"]["env_steps_per_s"]
    assert ratios["mlp 64 x 64, shm"] == pytest.approx(expected) and "shm / loop, env steps a second" not in results


def test_a_call_over_grpc_beside_bare_grpc() -> None:
    ((title, found),) = InferenceBench(seconds=0.3, rounds=1, envs=4)._call_ratio().items()
    assert "against bare grpc.aio" in title
    assert 0 < found["bare p50_us"] <= found["bare p99_us"] and 0 < found["p50_us"] <= found["p99_us"]
    assert found["p50 / bare p50"] == pytest.approx(found["p50_us"] / found["bare p50_us"])


def test_the_table_has_a_line_for_each() -> None:
    line = dict.fromkeys([*TABLE.values(), "USD_per_1e9_steps"], 1.0)
    head, first = make_table({"a, shm": line}, "USD")
    assert head.split()[-1] == "USD/1e9" and first.startswith("a, shm") and len(head) == len(first)


@pytest.mark.long
def test_the_loop_and_a_slow_environment() -> None:
    bench = InferenceBench(seconds=1.0, rounds=1, envs=4, widths=(1,), contenders=("loop", "shm"))
    results = bench.run()["results"]
    assert results["mlp 64 x 64, loop"]["batch"] == 8
    assert 0 < results["shm / loop, env steps a second"]["mlp 64 x 64"] < 3
    assert 0.5 < results["env steps a second of 3 actors"]["beside / alone"] < 1.5


@pytest.mark.long
def test_a_bench_with_a_learner() -> None:
    bench = InferenceBench(seconds=1.0, rounds=1, widths=(1,), learner=True, ratios=False)
    results = bench.run()["results"]
    local = results["mlp 64 x 64, local"]
    assert local["bytes_out_per_step"] > 16 and local["bytes_in_per_step"] > 0
    assert "mlp 64 x 64, loop" not in results and results["mlp 64 x 64, grpc-unix"]["batch"] > 0
