"""The optimizers of the recipes against those of the papers, written out in float64 as they and their code have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn

from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.learning.learner import LearnerConfig, owned
from veldt.learning.optim import Flat
from veldt.records.tree import Array

SIZE, UPDATES = 24, 1_000


def batches(items: int) -> Iterator[Array]:
    """Gradients [items, SIZE], one row for each item of a batch; of parameters with very different scales."""
    rng = np.random.default_rng(7)
    scale = 10.0 ** rng.uniform(-4, 1, SIZE)
    for _ in range(UPDATES):
        yield scale * rng.normal(0.2, 1.0, (items, SIZE))


def dqn_2015() -> Array:
    """NeuralQLearner.lua: dw is summed over the batch of 32."""
    w, g, g2 = [0.0] * SIZE, [0.0] * SIZE, [0.0] * SIZE
    for items in batches(32):
        dw = items.sum(0)
        for i in range(SIZE):
            g[i] = 0.95 * g[i] + 0.05 * dw[i]
            g2[i] = 0.95 * g2[i] + 0.05 * dw[i] ** 2
            w[i] -= 0.00025 * dw[i] / math.sqrt(g2[i] - g[i] ** 2 + 0.01)
    return np.array(w)


def apex_2018() -> Array:
    """Horgan et al. 2018: centred RMSProp of the mean gradient, whose norm is clipped to 40."""
    w, g, g2 = [0.0] * SIZE, [0.0] * SIZE, [0.0] * SIZE
    for items in batches(512):
        dw = clipped(items.mean(0), 40)
        for i in range(SIZE):
            g[i] = 0.95 * g[i] + 0.05 * dw[i]
            g2[i] = 0.95 * g2[i] + 0.05 * dw[i] ** 2
            w[i] -= 0.00025 / 4 * dw[i] / math.sqrt(g2[i] - g[i] ** 2 + 1.5e-7)
    return np.array(w)


def a3c_2016() -> Array:
    """Mnih et al. 2016, the RMSProp with shared statistics: not centred; the mean of squares starts at 0."""
    w, g2 = [0.0] * SIZE, [0.0] * SIZE
    for update, items in enumerate(batches(5)):
        dw, rate = items.sum(0), 7e-4 * (1 - update / UPDATES)
        for i in range(SIZE):
            g2[i] = 0.99 * g2[i] + 0.01 * dw[i] ** 2
            w[i] -= rate * dw[i] / math.sqrt(g2[i] + 0.1)
    return np.array(w)


def impala_2018() -> Array:
    """TensorFlow's RMSPropOptimizer, whose mean of squares starts at 1; the gradient is that of the summed loss."""
    w, ms, mom = [0.0] * SIZE, [1.0] * SIZE, [0.0] * SIZE
    for update, items in enumerate(batches(32)):
        dw, rate = clipped(items.sum(0), 40), 6e-4 * (1 - update / UPDATES)
        for i in range(SIZE):
            ms[i] = 0.99 * ms[i] + 0.01 * dw[i] ** 2
            mom[i] = 0.0 * mom[i] + rate * dw[i] / math.sqrt(ms[i] + 0.01)
            w[i] -= mom[i]
    return np.array(w)


def clipped(gradient: Array, most: float) -> Array:
    norm = math.sqrt(sum(x * x for x in gradient))
    return np.asarray(gradient * min(1.0, most / norm))


def ours(config: LearnerConfig, gradients: Iterator[Array]) -> Array:
    """Weights that begin at 0, after the updates."""
    flat, counters = Flat.of(nn.Linear(SIZE, 1, bias=False)), Counters()
    with torch.no_grad():
        flat.weights.zero_()
    updater = owned(flat, config, counters, env_steps=UPDATES)
    for gradient in gradients:
        flat.gradient.copy_(torch.from_numpy(gradient))
        updater.update([""], float(torch.linalg.vector_norm(flat.gradient)))
        counters.add("env_steps", 1)
    return flat.weights.detach().double().numpy()


ATARI = "ALE/Pong-v5"
A3C = LearnerConfig(optimizer="rmsprop", lr=7e-4, anneal=True, decay=0.99, eps=0.1, centered=False, clip_norm=0.0)


@pytest.mark.parametrize(
    ("config", "gradients", "paper"),
    [
        (recipes.make("dqn", ATARI).learner, lambda: (x.mean(0) for x in batches(32)), dqn_2015),
        (recipes.make("apex-dqn-paper", ATARI).learner, lambda: (x.mean(0) for x in batches(512)), apex_2018),
        (A3C, lambda: (x.sum(0) for x in batches(5)), a3c_2016),
        (recipes.make("impala", ATARI).learner, lambda: (x.sum(0) for x in batches(32)), impala_2018),
    ],
    ids=["dqn", "apex-dqn-paper", "a3c", "impala"],
)
def test_a_thousand_updates_are_those_of_the_paper(
    config: LearnerConfig, gradients: Callable[[], Iterator[Array]], paper: Callable[[], Array]
) -> None:
    """Our losses are means over the batch, but for IMPALA's, which is a sum as in the paper."""
    found, expected = ours(config, gradients()), paper()
    assert np.abs(expected).min() > 1e-6, "every parameter moves"
    assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
