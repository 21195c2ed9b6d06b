"""Weights that several workers change: RMSProp against its formula, the target network, and what a copy may contain."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from veldt.counters import Counters
from veldt.errors import Diverged, UserError
from veldt.learning import params
from veldt.learning.hogwild import Hogwild, SharedWeights
from veldt.learning.learner import LearnerConfig
from veldt.learning.optim import Flat
from veldt.program import Program
from veldt.records.tree import Array
from veldt.runtime.local.local import Local

SIZE, STEPS = 6, 100
CONFIG = LearnerConfig(optimizer="rmsprop", lr=0.01, anneal=True, eps=0.1, decay=0.9, centered=False, clip_norm=0.0)


def net(first: float = 0.0) -> Flat:
    flat = Flat.of(nn.Linear(SIZE, 1, bias=False))
    with torch.no_grad():
        flat.weights.fill_(first)
    return flat


class Shared:
    """Two workers and their arrays."""

    def __init__(self, own: bool = False, config: LearnerConfig = CONFIG, **target: Any) -> None:
        self.counters = Counters()
        self.weights, self.begun = np.zeros(SIZE, np.float32), np.zeros(1, np.int64)
        self.squares = [np.zeros(SIZE, np.float32) for _ in range(2 if own else 1)]
        self.shared = SharedWeights(self.weights, self.begun, self.counters, **target)
        self.workers = [self.worker(self.squares[-i], config) for i in range(2)]

    def worker(self, square: Array | None, config: LearnerConfig = CONFIG, first: float = 2.0) -> Hogwild:
        return Hogwild(self.shared, square, config, self.counters, STEPS)(net(first))

    def update(self, worker: Hogwild, gradient: Array, env_steps: int = 5) -> None:
        self.counters.add("env_steps", env_steps)
        worker.flat.gradient.copy_(torch.from_numpy(gradient))
        assert worker.update([""], float(np.linalg.norm(gradient)))
        self.counters.add("learner_steps", 1)


@pytest.mark.parametrize("own", [False, True])
def test_rmsprop_is_its_formula(own: bool) -> None:
    """g <- a g + (1 - a) d^2; w <- w - rate d / sqrt(g + eps). Two workers in turn, with one g for both or one each."""
    both = Shared(own)
    rng = np.random.default_rng(0)
    w, g = [2.0] * SIZE, [[0.0] * SIZE for _ in range(2)]
    for step in range(16):
        who, d = step % 2, rng.normal(size=SIZE).astype(np.float32)
        both.update(both.workers[who], d)
        rate = 0.01 * (1 - 5 * (step + 1) / STEPS)
        mine = g[who if own else 0]
        for i in range(SIZE):
            mine[i] = 0.9 * mine[i] + 0.1 * float(d[i]) ** 2
            w[i] -= rate * float(d[i]) / (mine[i] + 0.1) ** 0.5
    np.testing.assert_allclose(both.weights, w, rtol=1e-5)
    np.testing.assert_allclose(both.squares[0], g[0], rtol=1e-5)


def test_sgd_has_no_statistics() -> None:
    both = Shared(config=LearnerConfig(optimizer="sgd", lr=0.5, clip_norm=1.0))
    worker = both.worker(None, LearnerConfig(optimizer="sgd", lr=0.5, clip_norm=1.0))
    both.update(worker, np.full(SIZE, 4, np.float32))
    expected = 2 - 0.5 / SIZE**0.5  # the norm is clipped to 1
    np.testing.assert_allclose(both.weights, expected, rtol=1e-6)


def test_a_worker_acts_and_learns_on_a_copy_that_others_do_not_change() -> None:
    both = Shared()
    one, other = both.workers
    copy = one.pull(-1)
    assert copy.version == 0 and copy.vector is one.pull(0).vector
    assert (one.flat.net.weight == 2).all()  # type: ignore[union-attr]
    both.update(other, np.ones(SIZE, np.float32))
    assert (one.flat.weights == 2).all() and (both.weights < 2).all()
    both.update(one, np.ones(SIZE, np.float32))
    assert one.metrics()["stale_updates"] == 1.0, "the other's update came in between"
    assert one.pull(0).version == 2 and (one.flat.weights.numpy() == both.weights).all()
    both.update(one, np.ones(SIZE, np.float32))
    assert one.metrics()["stale_updates"] == 0.0 and "stale_updates" not in one.metrics()


def test_a_restarted_worker_does_not_begin_again() -> None:
    both = Shared()
    both.update(both.workers[0], np.ones(SIZE, np.float32))
    before = both.weights.copy()
    restarted = both.worker(both.squares[0], first=7.0)
    assert (both.weights == before).all()
    assert (restarted.pull(-1).vector == before).all()


def test_weights_that_are_not_finite_end_the_run() -> None:
    both = Shared()
    both.weights[3] = np.inf
    with pytest.raises(Diverged, match=r"The workers diverged: .* Lower learner\.lr"):
        both.workers[0].pull(-1)


def test_the_target_network_is_copied_every_so_many_steps_of_all_workers() -> None:
    target = np.zeros(SIZE, np.float32)
    both = Shared(target=target, copied=np.zeros(1, np.int64), target_every=20)
    assert (target == 2).all(), "the first weights"
    weights = {0: 2.0}
    for k in range(1, 13):
        both.update(both.workers[k % 2], np.ones(SIZE, np.float32))  # 5 env steps
        weights[k] = float(both.weights[0])
        assert target[0] == weights[k // 4 * 4], k
    follower = both.workers[1].target
    assert follower is not None and follower.numpy() is not target
    other = nn.Linear(SIZE, 1, bias=False)
    params.flatten(other, follower)
    target[:] = 9
    assert (other.weight == 9).all(), "all workers look at the same array"


def test_the_evaluator_gets_a_copy_with_the_counts_of_all_workers() -> None:
    both = Shared()
    both.update(both.workers[0], np.ones(SIZE, np.float32), env_steps=8)
    found = both.shared.pull(-1)
    assert (
        found is not None and (found.version, found.env_steps) == (1, 8) and abs(found.published_at - time.monotonic()) < 5
    )
    assert (found.vector == both.weights).all() and found.vector is not both.weights
    assert both.shared.pull(1) is None


def test_a_layout_names_all_that_is_shared() -> None:
    flat = Flat.of(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))
    assert params.layout(flat.net) == {
        "weights/0.weight": (3, 2),
        "weights/0.bias": (3,),
        "weights/1.weight": (3,),
        "weights/1.bias": (3,),
    }
    with pytest.raises(UserError, match=r"keeps 1.num_batches_tracked, which is no float"):
        params.layout(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


class Writer:
    """Writes numbers whose four bytes are all alike, so that a number of two halves would show."""

    LENGTH: ClassVar = 50_000

    def __init__(self, weights: Array, counters: Counters, number: int) -> None:
        self.words, self.counters, self.rng = weights.view(np.uint32), counters, np.random.default_rng(number)

    def step(self) -> bool:
        self.words[:] = np.uint32(0x01010101) * np.uint32(self.rng.integers(1, 0x70))
        self.counters.add("learner_steps", 1)
        return True


def test_every_number_of_a_copy_is_one_that_a_worker_wrote() -> None:
    """A checkpoint is taken while workers write: a mixture of versions, and no torn number."""
    from veldt.program import ROWS

    program = Program()
    counters = program.add("counters", Counters, ROWS)
    weights = program.array("weights", (Writer.LENGTH,), np.float32, {"weights/x": (Writer.LENGTH,)})
    for i in range(2):
        program.add(f"writer/{i}", Writer, weights, counters, i)
    mixed = 0
    with Local().start(program) as nodes:
        deadline = time.monotonic() + 30
        while nodes.count("learner_steps") < 100 and time.monotonic() < deadline:
            nodes.step()
        for _ in range(300):
            x = nodes._arrays()["/arrays/weights"]["weights/x"].view(np.uint8).reshape(-1, 4)
            assert (x == x[:, :1]).all() and x.all()
            mixed += bool((x != x[0]).any())
        assert nodes.count("learner_steps") > 200
    assert mixed, "no copy had numbers of two writes: the writers were not writing"
