"""The rules of population-based training against their definitions, and the toy of the paper."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from veldt.experiment.populations.rules import Exploit, Explore, Range, exploit, explore, p_value


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def chosen(how: Exploit, member: int, found: dict[int, Any], draws: int = 400) -> Counter[int | None]:
    return Counter(exploit(how, member, found, generator(seed)) for seed in range(draws))


# Whom a member copies.


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 10, 11])
def test_truncation_the_worst_fifth_copies_one_of_the_best_fifth_each_as_likely(n: int) -> None:
    """The fitness of member i is its index, so the ranks are the members. A fifth is rounded up."""
    found, few = {i: [i - 0.5, i + 0.5] for i in range(n)}, math.ceil(n / 5)
    for member in range(n):
        who = chosen(Exploit("truncation"), member, found)
        if member >= few:
            assert set(who) == {None}, member
        else:
            best = {i for i in range(n - few, n) if i > member}
            assert set(who) == best and min(who.values()) > 400 / len(best) / 2


def test_a_member_copies_neither_itself_nor_an_equal_nor_a_worse_one() -> None:
    rng = generator()
    for rule in ("truncation", "tournament", "t-test"):
        for _ in range(300):
            n = int(rng.integers(1, 7))
            found = {i: list(rng.integers(0, 3, 4).astype(float)) for i in range(n)}
            how = Exploit(rule, fraction=0.5, level=0.9)
            for member in found:
                donor = exploit(how, member, found, rng)
                assert donor is None or (donor != member and np.mean(found[donor]) > np.mean(found[member]))


def test_tournament_another_member_is_drawn_and_copied_if_it_is_better() -> None:
    found = {0: [1.0], 1: [2.0], 2: [3.0], 3: [0.0]}
    who = chosen(Exploit("tournament"), 1, found, 900)
    assert set(who) == {2, None} and 230 < who[2] < 370, "2 is one of three others"
    assert set(chosen(Exploit("tournament"), 2, found)) == {None}


def test_t_test_only_a_difference_that_is_significant_is_copied() -> None:
    worse, better, noisy = [1.0, 2.0, 3.0, 2.0, 2.0], [4.0, 5.0, 6.0, 5.0, 5.0], [-90.0, 100.0, 0.0, 90.0, -50.0]
    assert set(chosen(Exploit("t-test"), 0, {0: worse, 1: better})) == {1}
    assert np.mean(noisy) > np.mean(worse) and set(chosen(Exploit("t-test"), 0, {0: worse, 1: noisy})) == {None}
    assert set(chosen(Exploit("t-test"), 0, {0: [1.0], 1: [9.0]})) == {None}, "one episode says nothing"


@pytest.mark.parametrize(  # of tables of Student's distribution, two-sided
    ("freedom", "t", "p"),
    [(1, 12.706, 0.05), (2, 4.303, 0.05), (4, 2.776, 0.05), (10, 2.228, 0.05), (10, 3.169, 0.01), (30, 2.042, 0.05)],
)
def test_the_p_value_is_that_of_the_tables(freedom: int, t: float, p: float) -> None:
    """Two samples of equal size and variance have 2 (n - 1) degrees of freedom; so n = freedom / 2 + 1, or a sample against
    one that is almost constant has n - 1."""
    n = freedom + 1
    a = np.array([1.0, -1.0] * (n // 2) + ([0.0] if n % 2 else []))
    apart = t * math.sqrt(a.var(ddof=1) / n)
    assert p_value(list(a), list(apart + 1e-9 * np.arange(200))) == pytest.approx(p, rel=2e-3)


def test_a_member_without_returns_is_missing_not_zero() -> None:
    """All others are below 0: if it counted as 0 it would be the best."""
    found = {i: [-10.0 + i] for i in range(1, 5)}  # member 0 failed
    for rule in ("truncation", "tournament"):
        assert 0 not in chosen(Exploit(rule), 1, found)
        assert chosen(Exploit(rule), 0, found).keys() <= {1, 2, 3, 4}, "it copies one that is there"
    assert set(chosen(Exploit("truncation"), 0, found)) == {4}
    assert exploit(Exploit(), 0, {}, generator()) is None and exploit(Exploit(), 0, {0: [1.0]}, generator()) is None


def test_who_cannot_be_copied_is_ranked_all_the_same() -> None:
    found = {i: [float(i)] for i in range(5)}
    assert exploit(Exploit(), 0, found, generator(), donors={1, 2, 3}) is None, "the best fifth is 4 alone"
    assert exploit(Exploit(), 1, found, generator(), donors={2, 3, 4}) is None, "0 is worse"


# What it tries.


def test_perturb_each_value_is_multiplied_by_one_of_the_factors_each_as_likely() -> None:
    ranges = {"lr": Range("loguniform", 1e-6, 1.0), "cost": Range("uniform", 0.0, 10.0)}
    values, seen = {"lr": 1e-3, "cost": 2.0}, Counter[tuple[float, float]]()
    for seed in range(800):
        found = explore(Explore(), values, ranges, generator(seed))
        seen[round(found["lr"] / 1e-3, 6), round(found["cost"] / 2.0, 6)] += 1
    assert set(seen) == {(a, b) for a in (0.8, 1.2) for b in (0.8, 1.2)} and min(seen.values()) > 140


def test_values_stay_in_their_range_and_integers_are_whole_and_move() -> None:
    rng = generator()
    rate, batch = Range("loguniform", 1e-3, 1e-2), Range("uniform", 2, 64, whole=True)
    for _ in range(100):
        assert rate.perturb(9.9e-3, [1.2], rng) == 1e-2 and rate.perturb(1.1e-3, [0.8], rng) == 1e-3
    assert [batch.perturb(x, [1.2], rng) for x in (2, 10, 60)] == [3, 12, 64]
    assert [batch.perturb(x, [0.8], rng) for x in (2, 3, 10)] == [2, 2, 8]
    assert all(isinstance(x, int) for x in (batch.perturb(7, [0.8], rng), batch.draw(rng)))


def test_a_choice_moves_to_its_neighbour() -> None:
    sizes = Range("choices", choices=(16, 32, 64))
    assert [sizes.perturb(x, [1.2], generator()) for x in (16, 32, 64)] == [32, 64, 64]
    assert [sizes.perturb(x, [0.8], generator()) for x in (16, 32, 64)] == [16, 16, 32]


def test_resample_draws_from_the_range_with_that_probability() -> None:
    ranges, anew = {"lr": Range("loguniform", 1e-5, 1e-1)}, 0
    for seed in range(1_000):
        found = explore(Explore(resample=0.25), {"lr": 1e-3}, ranges, generator(seed))["lr"]
        assert 1e-5 <= found <= 1e-1
        anew += round(found / 1e-3, 6) not in (0.8, 1.2)
    assert 200 < anew < 300


def test_half_of_the_log_uniform_draws_are_below_the_geometric_mean() -> None:
    rng = generator()
    draws = [Range("loguniform", 1e-5, 1e-1).draw(rng) for _ in range(1_000)]
    assert 440 < sum(x < 1e-3 for x in draws) < 560 and min(draws) >= 1e-5 and max(draws) <= 1e-1
    draws = [Range("uniform", 0.0, 1.0).draw(rng) for _ in range(1_000)]
    assert 440 < sum(x < 0.5 for x in draws) < 560


# The toy of the paper (figure 2): the quality is 1.2 - a^2 - b^2, and a member sees the gradient of 1.2 - h0 a^2 - h1 b^2.


def toy(how: Exploit, seed: int, steps: int = 200, ready: int = 5) -> list[float]:
    """The quality of both members at the end."""
    rng, ranges = generator(seed), {name: Range("uniform", 0.0, 1.0) for name in ("h0", "h1")}
    weights = {0: np.array([0.9, 0.9]), 1: np.array([0.9, 0.9])}
    tuned = {0: {"h0": 1.0, "h1": 0.0}, 1: {"h0": 0.0, "h1": 1.0}}
    for step in range(1, steps + 1):
        for i in weights:
            weights[i] = weights[i] * (1 - 2 * 0.02 * np.array([tuned[i]["h0"], tuned[i]["h1"]]))
        if step % ready == 0:
            # Measured with a little noise: the two begin as mirror images, and an equal is not copied.
            quality = {i: [1.2 - float(w @ w) + rng.normal(0, 0.01)] for i, w in weights.items()}
            for i in weights:
                donor = exploit(how, i, quality, rng)
                if donor is not None:
                    weights[i] = weights[donor].copy()
                    tuned[i] = explore(replace(Explore(), resample=0.25), tuned[donor], ranges, rng)
    return [1.2 - float(w @ w) for w in weights.values()]


def test_the_toy_of_the_paper_is_solved_by_two_members_and_not_by_a_grid() -> None:
    assert max(toy(Exploit("none"), 0)) == pytest.approx(1.2 - 0.81, abs=0.01), "each sees one of the two"
    assert min(max(toy(Exploit("truncation"), seed)) for seed in range(5)) > 1.1
