"""Running normalisation: its statistics are those of all rows that were learned from, whatever their units."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from veldt.nets.normalize import LIMIT, RunningNorm
from veldt.nets.torsos import MLP


def batches(count: int, size: int = 3) -> list[torch.Tensor]:
    rng = np.random.default_rng(5)
    shift, scale = np.array([0.0, 1e3, -2.0]), np.array([1.0, 30.0, 1e-2])
    return [torch.from_numpy(rng.normal(shift, scale, (32, size))).float() for _ in range(count)]


def test_the_statistics_are_those_of_all_rows() -> None:
    norm, rows = RunningNorm(3), batches(200)
    for x in rows:
        norm(x)
    every = torch.cat(rows).double().numpy()
    np.testing.assert_allclose(norm.mean.numpy(), every.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(norm.variance.numpy(), every.var(0), rtol=1e-3)
    y = norm.eval()(torch.cat(rows)).numpy()
    np.testing.assert_allclose(y.mean(0), 0, atol=2e-2)
    np.testing.assert_allclose(y.std(0), 1, atol=2e-2)


def test_all_batches_of_a_run_weigh_the_same() -> None:
    """So the statistics come to rest with the learning rate; a network cannot follow them when that is near 0."""
    norm = RunningNorm(1)
    for _ in range(3_000):
        norm(torch.zeros(4, 1))
    for _ in range(3_000):
        norm(torch.full((4, 1), 10.0))
    assert norm.mean.item() == pytest.approx(5, rel=1e-2)
    assert norm.variance.item() == pytest.approx(25, rel=1e-2)


def test_only_learning_changes_the_statistics() -> None:
    norm = RunningNorm(3)
    norm(batches(1)[0])
    before = copy.deepcopy(norm.state_dict())
    with torch.no_grad():
        norm(batches(2)[1])
    norm.eval()(batches(2)[1])
    assert all(torch.equal(x, before[name]) for name, x in norm.state_dict().items())


def test_units_do_not_matter() -> None:
    torch.manual_seed(0)
    one = MLP(3, (16,), normalize=True)
    other = copy.deepcopy(one)
    x = batches(1)[0]
    torch.testing.assert_close(one(x), other(x * 50 - 7), rtol=1e-3, atol=1e-3)


def test_an_element_that_never_changed_stays_finite_when_it_does() -> None:
    norm = RunningNorm(2)
    norm(torch.zeros(8, 2))
    y = norm.eval()(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    assert y.tolist() == [[LIMIT, -LIMIT], [0.0, 0.0]]
