"""What actions are drawn from: probabilities add up to 1, frequencies are probabilities, and sums are the definitions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from oracles import chi_square

from veldt.errors import UserError
from veldt.learning.distributions import FARTHEST, LEAST, MOST, Categories, Gaussian, distribution_for
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, spec


def env_of(space: Any) -> EnvSpec:
    return EnvSpec("made up", {"obs": spec((2,), np.float32)}, spec(space.shape or (), np.int64), space)


def made(space: Any) -> Any:
    return distribution_for(env_of(space), "impala")


SPACES = {
    "one": spaces.Discrete(4),
    "single": spaces.Discrete(1),
    "several": spaces.MultiDiscrete([3, 2, 4]),
    "table": spaces.MultiDiscrete([[2, 3], [1, 4]]),
}


def parameters_of(of: Any, n: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    raw = torch.randn(n, of.size, generator=torch.Generator().manual_seed(seed)) * scale
    parameters: torch.Tensor = of.normalize(raw)
    return parameters


def every_action(space: Any) -> Array:
    """All actions of a space of choices: [number, *shape]."""
    if isinstance(space, spaces.Discrete):
        return np.arange(space.n)
    every = itertools.product(*(range(n) for n in space.nvec.ravel()))
    return np.array(list(every)).reshape(-1, *space.nvec.shape)


def probability(of: Categories, logits: Any, action: Any) -> float:
    """Of one action, by definition: the product over the choices of exp / sum of exp."""
    product, at = 1.0, 0
    for n, a in zip(of.choices, np.ravel(action), strict=True):
        weights = [math.exp(float(x)) for x in logits[at : at + n]]
        product *= weights[int(a)] / sum(weights)
        at += n
    return product


# Categories


@pytest.mark.parametrize("name", SPACES)
def test_probabilities_are_their_definition_and_add_up_to_one(name: str) -> None:
    of, actions = made(SPACES[name]), every_action(SPACES[name])
    raw = torch.randn(3, of.size, generator=torch.Generator().manual_seed(1)) * 3
    parameters = of.normalize(raw)
    taken = torch.from_numpy(actions)
    for b in range(3):
        found = of.log_prob(parameters[b].expand(len(actions), -1), taken).exp()
        assert float(found.double().sum()) == pytest.approx(1, abs=1e-5)
        expected = [probability(of, raw[b], action) for action in actions]
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("name", SPACES)
def test_entropy_and_kl_are_sums_over_all_actions(name: str) -> None:
    of, actions = made(SPACES[name]), every_action(SPACES[name])
    p, q = parameters_of(of, 3, 1, 2.0), parameters_of(of, 3, 2, 2.0)
    entropy, kl = of.entropy(p), of.kl(p, q)
    assert entropy.shape == kl.shape == (3,)
    for b in range(3):
        ps, qs = ([probability(of, x[b], action) for action in actions] for x in (p, q))
        assert entropy[b].item() == pytest.approx(-sum(x * math.log(x) for x in ps), abs=1e-5)
        assert kl[b].item() == pytest.approx(sum(x * math.log(x / y) for x, y in zip(ps, qs, strict=True)), abs=1e-5)
    assert of.kl(p, p).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["one", "several", "table"])
def test_frequencies_are_probabilities(name: str) -> None:
    space, n = SPACES[name], 40_000
    of, actions = made(space), every_action(space)
    parameters = parameters_of(of, 1, 3)
    out = of.draw(parameters.expand(n, -1).numpy(), np.ones(n), np.random.default_rng(0))
    assert set(out) == {"action"} and out["action"].shape == (n, *actions.shape[1:])
    assert out["action"].dtype == np.int64
    index = {tuple(np.ravel(action)): i for i, action in enumerate(actions)}
    observed = np.zeros(len(actions))
    for action in out["action"].reshape(n, -1).tolist():
        observed[index[tuple(action)]] += 1
    expected = n * np.array([probability(of, parameters[0], action) for action in actions])
    assert expected.min() > 5
    assert chi_square(observed, expected) > 1e-3
    assert chi_square(observed, np.full(len(actions), n / len(actions))) < 1e-6, "and it would tell a uniform one"


@pytest.mark.parametrize("name", SPACES)
def test_who_does_not_explore_takes_what_is_likeliest(name: str) -> None:
    """With explore = 0.5, half of the actions are drawn, independently for each environment."""
    space, n = SPACES[name], 4_000
    of, actions = made(space), every_action(space)
    parameters = parameters_of(of, 1, 4, 0.5)
    best = actions[np.argmax([probability(of, parameters[0], action) for action in actions])]
    explore = np.where(np.arange(n) % 2 == 0, 0.0, 0.5)
    out = of.draw(parameters.expand(n, -1).numpy(), explore, np.random.default_rng(0))["action"].reshape(n, -1)
    hit = (out == np.ravel(best)).all(1)
    assert hit[::2].all()
    chance = 0.5 + 0.5 * probability(of, parameters[0], best)
    assert hit[1::2].mean() == pytest.approx(chance, abs=4 * math.sqrt(0.25 / (n / 2)))


def test_environments_draw_from_their_own_row() -> None:
    of, n = made(spaces.Discrete(5)), 500
    sure = np.where(np.arange(5) == (np.arange(n) % 5)[:, None], 0.0, -80.0).astype(np.float32)
    for explore in (0.0, 1.0):
        out = of.draw(sure, np.full(n, explore), np.random.default_rng(0))["action"]
        np.testing.assert_array_equal(out, np.arange(n) % 5)


def test_an_action_that_cannot_be_is_never_drawn() -> None:
    of, n = made(spaces.Discrete(3)), 20_000
    log_p = np.tile(np.log(np.array([0.5, 1e-38, 0.5])).astype(np.float32), (n, 1))
    log_p[:, 1] = -np.inf
    assert set(of.draw(log_p, np.ones(n), np.random.default_rng(0))["action"].tolist()) == {0, 2}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_choices_are_encoded_one_hot_side_by_side(name: str, leading: tuple[int, ...]) -> None:
    space, rng = SPACES[name], np.random.default_rng(0)
    of, n = made(space), int(np.prod(leading))
    nvec = np.array([space.n]) if isinstance(space, spaces.Discrete) else space.nvec
    shape = () if isinstance(space, spaces.Discrete) else nvec.shape
    action = rng.integers(0, np.broadcast_to(nvec.reshape(shape), (n, *shape)))
    expected = np.zeros((n, sum(nvec.ravel())), np.float32)
    for i in range(n):
        at = 0
        for count, a in zip(nvec.ravel(), np.ravel(action[i]), strict=True):
            expected[i, at + a] = 1
            at += count
    taken = torch.from_numpy(action.reshape(*leading, *shape))
    found = of.encode(taken)
    assert of.encoded == of.size == expected.shape[1]
    np.testing.assert_array_equal(found.numpy(), expected.reshape(*leading, -1))
    parameters = parameters_of(of, n, 5).reshape(*leading, -1)
    log_prob = of.log_prob(parameters, taken)
    assert log_prob.shape == of.entropy(parameters).shape == of.kl(parameters, parameters).shape == leading
    torch.testing.assert_close(log_prob, (found * parameters).sum(-1))


# Gaussians


def box(low: Any, high: Any, shape: tuple[int, ...] = (3,)) -> spaces.Box:
    return spaces.Box(np.broadcast_to(np.float32(low), shape), np.broadcast_to(np.float32(high), shape))


def test_a_gaussian_is_torchs() -> None:
    of = Gaussian(box(-1, 1))
    p, q = parameters_of(of, 6, 1), parameters_of(of, 6, 2)
    taken = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    one, other = (torch.distributions.Normal(x[:, :3].double(), x[:, 3:].double().exp()) for x in (p, q))
    torch.testing.assert_close(of.log_prob(p, taken), one.log_prob(taken.double()).sum(1).float(), rtol=1e-4, atol=1e-4)
    free = Gaussian(box(-np.inf, np.inf))
    torch.testing.assert_close(free.entropy(p), one.entropy().sum(1).float(), rtol=1e-5, atol=1e-5)
    kl = torch.distributions.kl_divergence(one, other).sum(1).float()
    torch.testing.assert_close(of.kl(p, q), kl, rtol=1e-4, atol=1e-5)
    assert of.kl(p, p).abs().max() < 1e-6


def test_a_density_integrates_to_one() -> None:
    of = Gaussian(box(-1, 1, (1,)))
    parameters = torch.tensor([0.3, -0.7])
    at = torch.linspace(-8, 8, 4001)[:, None]
    density = of.log_prob(parameters.expand(len(at), -1), at).exp().double()
    assert float(density.sum()) * 16 / 4000 == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("mean", [0.0, 0.4, -1.5])
@pytest.mark.parametrize("log_std", [-3.0, -0.5, 0.0, 0.7])
def test_the_entropy_is_that_of_the_action(mean: float, log_std: float) -> None:
    """-E log p(a) of a = tanh(x) in units of half the range, summed over a fine grid of x; so it is at most log 2, that of
    actions spread evenly over the range, where that of x has no limit."""
    x = np.linspace(mean - 10 * np.exp(log_std), mean + 10 * np.exp(log_std), 200_001)
    density = np.exp(-0.5 * ((x - mean) / np.exp(log_std)) ** 2 - log_std) / np.sqrt(2 * np.pi)
    log_slope = 2 * (np.log(2) - x - np.logaddexp(0, -2 * x))  # of tanh
    expected = np.sum(density * (log_slope - np.log(np.maximum(density, 1e-300)))) * (x[1] - x[0])
    assert expected <= np.log(2)
    parameters = torch.tensor([mean, log_std], requires_grad=True)
    found = Gaussian(box(-3, 5, (1,))).entropy(parameters)
    assert found.item() == pytest.approx(expected, abs=0.01)
    found.backward()
    assert parameters.grad is not None
    if log_std > 0:
        assert parameters.grad[1] < 0, "too wide: most draws are near a bound"
    if mean:
        assert parameters.grad[0] * mean < 0, "off the middle"


def test_the_entropy_of_far_draws_is_finite() -> None:
    parameters = torch.tensor([[1e6, MOST], [-1e6, LEAST]], requires_grad=True)
    found = Gaussian(box(-1, 1, (1,))).entropy(parameters)
    found.sum().backward()
    assert found.isfinite().all() and parameters.grad is not None and parameters.grad.isfinite().all()


def test_means_and_log_deviations_are_kept_in_bounds() -> None:
    of = Gaussian(box(-1, 1, (2,)))
    raw = torch.tensor([[-70.0, 90.0, -70.0, 90.0], [0.5, -0.5, 0.05, -0.1], [0.0, 0.0, 3.0, -6.0]], requires_grad=True)
    out = of.normalize(raw)
    assert out[0].tolist() == [-FARTHEST, FARTHEST, LEAST, MOST]
    assert Gaussian(box(-1, np.inf, (2,))).normalize(raw)[0].tolist() == [-70.0, 90.0, LEAST, MOST]
    torch.testing.assert_close(out[1], raw[1], rtol=1e-2, atol=0)  # near 0 nothing changes
    out[2].sum().backward()
    assert raw.grad is not None and (raw.grad[2] > 1e-3).all(), "there is a way back"


@pytest.mark.parametrize("shape", [(), (2,), (3, 2)])
def test_bounded_actions_are_drawn_in_units_of_half_their_range(shape: tuple[int, ...]) -> None:
    """What was drawn is recorded as it is; the action is its tanh in the environment's units."""
    of, n = Gaussian(box(-3, 5, shape)), 20_000
    width = int(np.prod(shape))
    assert (of.encoded, of.size, of.taken) == (width, 2 * width, "drawn")
    assert of.extras == {"drawn": spec((width,), np.float32)}
    mean, log_std = np.linspace(-0.6, 0.7, width), np.linspace(-0.9, 0.2, width)
    parameters = np.tile(np.concatenate([mean, log_std]), (n, 1)).astype(np.float32)
    out = of.draw(parameters, np.ones(n), np.random.default_rng(0))
    drawn, action = out["drawn"], out["action"].reshape(n, width)
    assert set(out) == {"action", "drawn"} and out["action"].shape == (n, *shape)
    assert out["action"].dtype == drawn.dtype == np.float32
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(drawn.std(0), np.exp(log_std), rtol=0.03)
    np.testing.assert_allclose(action, 1 + 4 * np.tanh(drawn.astype(np.float64)), rtol=1e-5, atol=1e-6)
    assert (abs(drawn) > 1).any()
    assert action.min() >= -3 and action.max() <= 5
    assert abs(np.atleast_2d(np.corrcoef(drawn.T)) - np.eye(width)).max() < 0.05, "each on its own"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-np.inf, np.inf, [-40, 0.5, 40]), (0.0, np.inf, [0, 0.5, 40]), (-np.inf, 2.0, [-40, 0.5, 2])],
)
def test_actions_without_a_range_are_taken_as_drawn(low: float, high: float, expected: list[float]) -> None:
    of = Gaussian(box(low, high))
    out = of.draw(np.array([[-40, 0.5, 40, -5, -5, -5]], np.float32), np.zeros(1), np.random.default_rng(0))
    assert out["action"].tolist() == [expected]
    assert out["drawn"].tolist() == [[-40, 0.5, 40]]


def test_bounds_may_differ_from_one_part_to_the_next() -> None:
    space = spaces.Box(np.array([-1, 10, -np.inf], np.float32), np.array([1, 10.5, np.inf], np.float32))
    of = Gaussian(space)
    means = np.array([[0.5, -50, 7, 0, 0, 0], [50, 0, -7, 0, 0, 0]], np.float32)
    out = of.draw(means, np.zeros(2), np.random.default_rng(0))
    np.testing.assert_allclose(out["action"], [[np.tanh(0.5), 10, 7], [1, 10.25, -7]], rtol=1e-6)
    assert all(space.contains(action) for action in out["action"])
    wide = spaces.Box(np.float32(-3e38), np.float32(3e38), (2,))
    out = Gaussian(wide).draw(np.array([[0.0, -50, 0, 0]], np.float32), np.zeros(1), np.random.default_rng(0))
    np.testing.assert_allclose(out["action"], [[0, -3e38]], rtol=1e-6)  # a range that no float32 could hold


@pytest.mark.parametrize("bound", [1e39, 1e300, float(np.finfo(np.float64).max)])
def test_a_bound_that_no_float32_can_hold_is_none(bound: float) -> None:
    """Some environments say so that they have none."""
    space = spaces.Box(np.array([-bound, 0, -1]), np.array([bound, bound, 1]), dtype=np.float64)
    out = Gaussian(space).draw(np.array([[-40, 0.5, 0.5, -5, -5, -5]], np.float32), np.zeros(1), np.random.default_rng(0))
    np.testing.assert_allclose(out["action"], [[-40, 0.5, np.tanh(0.5)]], rtol=1e-6)


def test_draws_of_a_range_with_one_bound_begin_at_the_allowed_action_that_is_nearest_to_0() -> None:
    """Around 0 all of them would be clipped to the same action."""
    space = spaces.Box(np.array([5, -np.inf, -3], np.float32), np.array([np.inf, -2, np.inf], np.float32))
    out = Gaussian(space).draw(np.array([[1, 0, 1, 0, 0, 0]], np.float32), np.zeros(1), np.random.default_rng(0))
    assert out["action"].tolist() == [[6, -2, 1]]


def test_a_gaussian_that_does_not_explore_takes_the_mean() -> None:
    of, n = Gaussian(box(-1, 1)), 4_000
    parameters = np.tile(np.array([0.1, -0.2, 0.3, 0, 0, 0], np.float32), (n, 1))
    explore = np.where(np.arange(n) % 2 == 0, 0.0, 0.5)
    drawn = of.draw(parameters, explore, np.random.default_rng(0))["drawn"]
    at_mean = (drawn == parameters[:, :3]).all(1)
    assert at_mean[::2].all()
    assert at_mean[1::2].mean() == pytest.approx(0.5, abs=0.05)


def test_what_was_drawn_is_encoded_within_bounds() -> None:
    of = Gaussian(box(-3, 5))
    torch.testing.assert_close(of.encode(torch.tensor([[0.25, -70.0, 1.5]])), torch.tensor([[0.25, -70.0, 1.5]]).tanh())
    free = Gaussian(box(-np.inf, np.inf))
    assert free.encode(torch.tensor([[0.25, -7.0, 1.5]])).tolist() == [[0.25, -1.0, 1.0]]


# Which for what


@pytest.mark.parametrize(
    ("space", "kind", "size"),
    [
        (spaces.Discrete(4), Categories, 4),
        (spaces.Discrete(3, start=5), Categories, 3),
        (spaces.MultiDiscrete([3, 2, 4]), Categories, 9),
        (spaces.Box(-1, 1, (3,)), Gaussian, 6),
        (spaces.Box(-1, 1, (3,), np.float64), Gaussian, 6),
    ],
)
def test_each_space_of_actions_has_its_distribution(space: Any, kind: type, size: int) -> None:
    of = made(space)
    assert type(of) is kind and of.size == size
    assert of.taken == ("drawn" if kind is Gaussian else "action")


@pytest.mark.parametrize(
    "space", [spaces.Box(0, 9, (2,), np.int64), spaces.MultiBinary(3), spaces.Tuple([spaces.Discrete(2)])], ids=str
)
def test_other_spaces_are_refused_in_words(space: Any) -> None:
    with pytest.raises(UserError, match=r"impala needs Discrete, MultiDiscrete or Box actions of floats, but made up has"):
        made(space)
