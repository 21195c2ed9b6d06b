"""Running normalisation: its statistics are those of all rows that were learned from, whatever their units."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

from veldt.envs import make_env
from veldt.learning import params
from veldt.nets.normalize import LARGE, LIMIT, Moderate, RunningNorm
from veldt.nets.torsos import MLP, torso_for
from veldt.records.adapter import Adapter
from veldt.records.step import EnvSpec


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


def moderate(rows: torch.Tensor, low: float = -np.inf, high: float = np.inf) -> torch.Tensor:
    size = rows.shape[1]
    norm = Moderate(np.full(size, low), np.full(size, high))
    for x in rows.split(32):
        norm(x)
    return norm.eval()(rows)


def test_what_is_very_large_becomes_moderate_and_all_else_stays() -> None:
    rows = torch.cat(batches(200))  # deviations 1, 30, 0.01 around 0, 1,000, -2
    out = moderate(rows)
    torch.testing.assert_close(out[:, [0, 2]], rows[:, [0, 2]])
    assert out[:, 1].mean() == pytest.approx(LARGE * LARGE / 30, rel=0.1)  # moved to LARGE, and then reduced
    assert out[:, 1].std() == pytest.approx(LARGE, rel=2e-2)


def test_what_is_large_at_first_is_moderate_from_the_first_batch_on_and_a_copy_agrees() -> None:
    """A policy has a copy of the buffers, and never learns."""
    norm, copied = (Moderate(np.full(1, -np.inf), np.full(1, np.inf)) for _ in range(2))
    x = torch.linspace(900.0, 1_100.0, 32)[:, None]
    learned = norm(x)
    assert learned.std().item() == pytest.approx(LARGE, rel=0.05)
    assert learned.mean().item() == pytest.approx(LARGE**2 / x.std().item(), rel=0.05)
    params.flatten(copied).copy_(params.flatten(norm))  # as weights are published
    assert torch.equal(copied.eval()(x), learned)


def test_weights_that_were_saved_act_as_before_though_they_hold_the_statistics_alone() -> None:
    """Runs of all versions can be evaluated and resumed: what follows from the statistics is in no checkpoint."""
    norm, loaded = (
        torch.nn.Sequential(Moderate(np.full(1, 0.0), np.full(1, 0.1)), torch.nn.Linear(1, 1)) for _ in range(2)
    )
    x = torch.linspace(900.0, 1_100.0, 32)[:, None]
    norm(x)
    saved = params.export(norm)
    assert {name.rpartition(".")[2] for name in saved if name.startswith("0.")} == {
        *("mean", "variance", "batches", "center", "factor"),
    }
    params.restore(loaded, saved)
    assert torch.equal(loaded[0].eval()(x), norm[0].eval()(x))


def test_a_narrow_range_is_scaled_to_one() -> None:
    x = torch.tensor([[0.9], [1.0], [1.1]]).repeat(40, 1)
    torch.testing.assert_close(moderate(x, 0.9, 1.1)[:3], torch.tensor([[-1.0], [0.0], [1.0]]))
    assert torch.equal(moderate(x, 0.0, 2.0), x), "this one is wide enough"
    assert torch.equal(moderate(x, 1.0, 1.0), x), "a range without width tells nothing"


def test_a_network_gets_the_ranges_of_its_environment() -> None:
    """MountainCar's velocities are between -0.07 and 0.07."""
    with contextlib.closing(make_env("MountainCar-v0")) as envs:
        net = torso_for(envs.spec, 2, (), (16,), normalize=True)
    assert isinstance(net, MLP) and net.norm is not None
    torch.testing.assert_close(net.norm.factor, torch.tensor([1, 1 / 0.07, 1, 1 / 0.07]))


@pytest.mark.parametrize("made", [RunningNorm(2), Moderate(np.full(2, -np.inf), np.full(2, np.inf))], ids=["all", "some"])
def test_one_huge_observation_does_not_end_the_statistics(made: RunningNorm) -> None:
    """Some environments say 3e38 for `nothing seen`; its square is no float32."""
    made(torch.tensor([[0.0, 3e38], [0.0, -3e38]]))
    for x in batches(5, 3):
        y = made(x[:, :2])
        assert y.isfinite().all()
    assert made.mean.isfinite().all() and made.variance.isfinite().all()


def test_a_range_that_is_too_narrow_for_floats_is_not_scaled_up() -> None:
    x = torch.tensor([[0.0], [1e-39]])
    assert moderate(x, 0.0, 1e-39).isfinite().all()


def test_a_shrunk_image_has_the_range_of_the_whole() -> None:
    low = np.zeros((48, 64, 3), np.float32)
    low[..., 1] = -0.1
    env = EnvSpec.of("e", Adapter(spaces.Box(low, low + 0.2), spaces.Discrete(2), "e", image_size=36))
    net = torso_for(env, 2, (), (16,), convnet="mlp", normalize=True)
    assert isinstance(net, MLP) and net.norm is not None
    torch.testing.assert_close(net.norm.factor, torch.full((2 * 36 * 36 * 3,), 1 / 0.15))
    assert net(torch.zeros(1, 2, 36, 36, 3)).shape == (1, 16)


def test_an_element_that_never_changed_stays_finite_when_it_does() -> None:
    norm = RunningNorm(2)
    norm(torch.zeros(8, 2))
    y = norm.eval()(torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
    assert y.tolist() == [[LIMIT, -LIMIT], [0.0, 0.0]]
