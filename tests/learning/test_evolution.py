"""The mathematics of evolution strategies, and a master that is given returns by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.learning.evolution import (
    ALIGN,
    EvolutionConfig,
    centered_ranks,
    episode_seed,
    estimate,
    fill_noise,
    noise_index,
    noiseless_episodes,
    observes,
)
from veldt.learning.master import Master
from veldt.learning.optim import Momentum
from veldt.learning.params import LatestParams

TABLE, SEED = 20_000, 3


def test_ranks_by_hand() -> None:
    found = centered_ranks(np.array([[10.0, -3.0], [0.5, 99.0]]))
    assert found.tolist() == [[2 / 3 - 0.5, -0.5], [1 / 3 - 0.5, 0.5]]


def test_equal_returns_share_the_mean_of_their_ranks() -> None:
    """Ranks 0, (1 + 2) / 2 twice, 3, (4 + 5) / 2 twice, of 6 returns."""
    found = centered_ranks(np.array([[1.0, 1.0], [0.0, 7.0], [7.0, 5.0]]))
    assert np.allclose(found, np.array([[1.5, 1.5], [0, 4.5], [4.5, 3]]) / 5 - 0.5)
    assert found.sum() == pytest.approx(0)
    assert (centered_ranks(np.full((4, 2), 3.0)) == 0).all(), "nothing is better than anything else"
    assert centered_ranks(np.array([[math.inf, -math.inf]])).tolist() == [[0.5, -0.5]]


def test_the_estimate_is_its_definition() -> None:
    rng = np.random.default_rng(0)
    returns, noise = rng.normal(size=(6, 2)), rng.normal(size=(6, 5)).astype(np.float32)
    out = np.full(5, 9, np.float32)
    estimate(returns, list(noise), out)
    flat = returns.ravel()
    rank = [[sum(other < x for other in flat) / 11 - 0.5 for x in row] for row in returns]
    expected = sum((plus - minus) * eps for (plus, minus), eps in zip(rank, noise.astype(float), strict=True)) / 12
    assert np.allclose(out, expected, atol=1e-6)


def test_it_points_up_a_quadratic() -> None:
    """f(x) = -sum of a (x - b)^2, whose gradient is known: with 512 pairs the cosine is above 0.9."""
    rng = np.random.default_rng(1)
    a, b, x, sigma = rng.uniform(0.5, 2, 40), rng.normal(size=40), np.zeros(40), 0.02
    table = np.zeros(200_000, np.float32)
    fill_noise(table, SEED)
    at = [noise_index(SEED, 0, pair, len(table), 40) for pair in range(512)]
    noise = [table[i : i + 40] for i in at]
    returns = np.array([[-(a * (x + sign * sigma * eps - b) ** 2).sum() for sign in (1, -1)] for eps in noise])
    out = np.zeros(40, np.float32)
    estimate(returns, noise, out)
    gradient = -2 * a * (x - b)
    assert out @ gradient / np.linalg.norm(out) / np.linalg.norm(gradient) > 0.9


def test_noise_follows_from_the_seed() -> None:
    one, again, other = (np.zeros(2_500_000, np.float32) for _ in range(3))
    fill_noise(one, 5), fill_noise(again, 5), fill_noise(other, 6)
    assert one.tobytes() == again.tobytes() != other.tobytes()
    assert abs(one.mean()) < 0.005 and one.std() == pytest.approx(1, abs=0.005)
    assert one[0] != one[1 << 20], "each chunk has numbers of its own"
    at = [noise_index(1, g, j, 1_000, 100) for g in range(40) for j in range(40)]
    assert min(at) == 0 and max(at) + 100 <= 1_000 and not any(i % ALIGN for i in at)
    assert set(at) == set(range(0, 901, ALIGN)), "all of the table is used"


def test_seeds_of_episodes() -> None:
    apart = EvolutionConfig(seeds="own")
    seeds = [episode_seed(apart, 1, g, j, sign) for g in range(20) for j in range(20) for sign in (1, -1)]
    seeds += [episode_seed(apart, 1, g, -1 - j, 0) for g in range(20) for j in range(20)]
    assert len(set(seeds)) == len(seeds)
    pair, whole = EvolutionConfig(seeds="pair"), EvolutionConfig(seeds="generation")
    assert episode_seed(pair, 1, 2, 3, 1) == episode_seed(pair, 1, 2, 3, -1) != episode_seed(pair, 1, 2, 4, 1)
    assert episode_seed(whole, 1, 2, 3, 1) == episode_seed(whole, 1, 2, 4, -1) != episode_seed(whole, 1, 3, 3, 1)


def test_fractions() -> None:
    config = EvolutionConfig(pairs=10, noiseless=0.03, observe=0.25)
    per_generation = [noiseless_episodes(config, g) for g in range(100)]
    assert sum(per_generation) == 60 and max(per_generation) == 1
    seen = [observes(config, 1, g, j) for g in range(50) for j in range(40)]
    assert np.mean(seen) == pytest.approx(0.25, abs=0.04)
    assert not observes(config, 1, 0, -1)


def test_momentum_by_hand() -> None:
    import torch

    weights, gradient = torch.tensor([1.0]), torch.tensor([2.0])
    optimizer = Momentum(weights, gradient, 0.9)
    optimizer.step(0.5)  # velocity 0.2
    assert weights.item() == pytest.approx(1 - 0.5 * 0.2)
    optimizer.step(0.5)  # 0.9 * 0.2 + 0.2
    assert weights.item() == pytest.approx(0.9 - 0.5 * 0.38)


def master(**changes: Any) -> Master:
    settings = {"learner.pairs": 4, "learner.noiseless": 0.0, "learner.weight_decay": 0.0, **changes}
    config = recipes.make("es", "CartPole-v1", **settings)
    env, table = config.env_spec(), np.zeros(TABLE, np.float32)
    return Master(config.algorithm, env, LatestParams(), Counters(), config.learner, 10_000, SEED, table)


def give(node: Master, pairs: Any, returns: Any, generation: int | None = None) -> None:
    number = node.number if generation is None else generation
    for pair in pairs:
        node.result(number, pair, *map(float, returns[pair]), 10, 20)


RETURNS = np.array([[1, 2], [3, 0], [5, 5], [9, 4]])


def weights(node: Master) -> bytes:
    return node.flat.weights.numpy().tobytes()


def test_the_update_does_not_depend_on_the_order_of_arrival() -> None:
    one, other = master(), master()
    give(one, [0, 1, 2, 3], RETURNS)
    give(other, [3, 1, 3, 1, 0, 2], RETURNS)  # restarted workers repeat
    assert one.step() and other.step()
    assert weights(one) == weights(other)
    assert other.repeated == 2 and other.env_steps == one.env_steps == 4 * 30


def test_a_generation_is_exactly_its_pairs() -> None:
    node = master()
    give(node, [0, 1, 2], RETURNS)
    node.result(node.number, 4, 1e9, 0.0, 1, 1)  # there is no such pair
    give(node, [3], RETURNS, generation=5)
    assert not node.step() and node.late == 2
    give(node, [3], RETURNS)
    assert node.step() and node.number == 1


def test_in_mode_first_the_first_that_arrive_count() -> None:
    node = master(**{"learner.mode": "first"})
    returns = {pair: (pair, -pair) for pair in range(100)}
    give(node, [7, 90, 8, 8, 3], returns)
    give(node, [4], returns)
    assert node.step() and node.number == 1
    assert node.repeated == 1 and node.late == 1
    give(node, [5], returns, generation=0)
    assert node.late == 2 and node.env_steps == (4 + 3) * 30, "what came too late was played all the same"


def test_equal_returns_change_nothing() -> None:
    node = master(**{"learner.weight_decay": 0.1})
    give(node, range(4), RETURNS)
    assert node.step()
    before = weights(node)
    give(node, range(4), np.full((4, 2), 7))
    assert node.step() and weights(node) == before and node.skipped == 1
    give(node, range(4), RETURNS)
    assert node.step() and weights(node) != before


def test_weight_decay_pulls_to_zero() -> None:
    node = master(**{"learner.weight_decay": 1e6, "learner.lr": 0.05})
    before = np.abs(node.flat.weights.numpy()[: node.size].copy())
    give(node, range(4), RETURNS)
    node.step()
    change = np.abs(node.flat.weights.numpy()[: node.size]) - before
    assert (change[before > 0.06] < 0).all() and (before > 0.06).sum() > 50


def test_the_cap_grows_where_episodes_reach_it() -> None:
    node = master(**{"learner.cap": 20, "learner.cap_fraction": 0.5, "learner.cap_growth": 2.0})
    found = node.generation()
    assert found is not None and found.cap == 20
    give(node, range(4), RETURNS)  # half of the episodes have 20 steps
    node.step()
    assert node.cap == 41
    give(node, range(4), RETURNS)
    node.step()
    assert node.cap == 41


def test_statistics_are_those_of_the_observations_in_the_order_of_pairs() -> None:
    node, rng = master(), np.random.default_rng(0)
    x = rng.normal(size=(4, 50, 4)) * [1, 2, 3, 4] + [0, 1, 2, 3]
    for pair in (2, 0, 3, 1):
        sums = np.concatenate([[50], x[pair].sum(0), (x[pair] ** 2).sum(0)])
        for _ in range(2):  # a worker that was restarted sends it again
            node.observations(0, pair, sums)
        give(node, [pair], RETURNS)
    node.observations(1, 0, sums * 9)
    node.step()
    norm = node.net.norm
    assert norm is not None
    assert np.allclose(norm.mean, x.reshape(-1, 4).mean(0), atol=1e-5)
    assert np.allclose(norm.variance, x.reshape(-1, 4).var(0), rtol=1e-4)
    found = node.generation()
    assert found is not None and np.allclose(found.vector[-8:-4], norm.mean)


def test_the_last_steps_are_counted_when_their_generation_is_complete() -> None:
    node = master()
    node.last_step = 100
    give(node, [0, 1, 2], np.full((4, 2), 1.0))
    node.result(0, 2, 0.0, 0.0, 1000, 1000)  # repeated: it does not count
    node.step()
    assert node.counters.get("env_steps") == 90
    node._steps = 5_000
    node.step()
    assert node.counters.get("env_steps") == 99, "the run must not end within a generation"
    give(node, [3], RETURNS)
    node.step()
    assert node.counters.get("env_steps") >= 5_000 and node.done
    found = node.generation()
    assert found is not None and found.number == -1, "there is nothing more to do"


def test_a_restarted_master_asks_for_its_generation_again() -> None:
    one = master()
    give(one, range(4), RETURNS)
    one.step()
    give(one, [0], -RETURNS)
    state = one.state()
    config = recipes.make(
        "es", "CartPole-v1", **{"learner.pairs": 4, "learner.noiseless": 0.0, "learner.weight_decay": 0.0}
    )
    args = (config.algorithm, config.env_spec(), LatestParams(), one.counters, config.learner, 10_000, SEED)
    other = Master(*args, np.zeros(TABLE, np.float32), None, 1)
    other.load_state(state)
    found, before = other.generation(), one.generation()
    assert found is not None and before is not None
    assert found.number == before.number and found.version != before.version
    assert found.vector.tobytes() == before.vector.tobytes()
    for node in (one, other):
        give(node, range(4), -RETURNS)
        assert node.step()
    assert weights(one) == weights(other)
