"""When weights are published, and which."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import Published

from veldt.errors import Diverged
from veldt.learning.params import Publisher


def publish(of: Publisher, *versions: int) -> None:
    """Weights whose elements are all their version."""
    for version in versions:
        of.vector.fill_(version)
        of.publish(version, 10 * version)


def published(of: Publisher) -> list[int]:
    assert isinstance(of.params, Published)
    for weights in of.params.all:
        assert (weights.vector == weights.version).all(), "the weights of this version"
        assert weights.env_steps == 10 * weights.version, "and when they were made"
    return [weights.version for weights in of.params.all]


@pytest.mark.parametrize(
    ("lag", "updates", "expected"),
    [
        (0, [0, 1, 2, 3], [0, 1, 2, 3]),
        (2, [0, 1, 2, 3, 4], [0, 0, 0, 1, 2]),
        (2, [0, 3, 6, 9], [0, 0, 3, 6]),  # at least 2 updates late, of those that were offered
        (9, [0, 1, 2], [0, 0, 0]),
    ],
)
def test_published_weights_are_at_least_lag_updates_old(lag: int, updates: list[int], expected: list[int]) -> None:
    one = Publisher(Published(), torch.zeros(3), lag)
    publish(one, *updates)
    assert published(one) == expected and one.published == len(expected)


def test_the_newest_may_be_published_and_the_lag_starts_again_from_there() -> None:
    one = Publisher(Published(), torch.zeros(3), lag=2)
    publish(one, 0, 1, 2)
    one.publish_newest(2, 20)
    publish(one, 3, 4, 5)
    assert published(one) == [0, 0, 0, 2, 2, 2, 3]


def test_published_weights_do_not_change_later() -> None:
    one = Publisher(Published(), torch.zeros(3))
    publish(one, 1)
    one.vector.fill_(5)
    assert published(one) == [1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("lag", [0, 2])
def test_weights_that_are_not_finite_are_never_published(bad: float, lag: int) -> None:
    one = Publisher(Published(), torch.zeros(3), lag)
    publish(one, 1)
    one.vector[1] = bad
    with pytest.raises(Diverged, match=r"not finite after 2 updates.*learner\.lr"):
        one.publish(2, 20)
    assert published(one) == [1] and one.published == 1


def test_weights_of_a_gpu_are_copied_to_the_host() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    one = Publisher(Published(), torch.zeros(3, device="cuda"), lag=1)
    publish(one, 0, 1, 2)
    assert published(one) == [0, 0, 1]
