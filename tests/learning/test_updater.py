"""What becomes of a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import Normed
from torch import nn

from veldt.learning import optim
from veldt.learning.optim import Flat, Owned


def two_groups() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Linear(3, 1)})


def owned(flat: Flat, kind: Any = optim.SGD, lr: float = 0.5, clip_norm: float = 0.0, **settings: Any) -> Owned:
    return Owned(flat, lambda weights, gradient: kind(weights, gradient, **settings), lambda: lr, clip_norm)


def test_flat_is_views_of_the_network() -> None:
    net = Normed()
    flat = Flat.of(net)
    assert len(flat.gradient) == sum(p.numel() for p in net.parameters()) == len(flat.weights) - len(flat.buffers)
    net(torch.randn(4, 8)).sum().backward()
    assert flat.gradient.any()
    with torch.no_grad():
        flat.buffers.fill_(7)
    assert (net.norm.running_mean == 7).all() and not (net.q.weight == 7).any()


def test_only_the_groups_that_have_a_loss_are_updated() -> None:
    flat = Flat.of(two_groups())
    before = flat.weights.clone()
    flat.gradient.fill_(1.0)
    one = owned(flat)
    assert one.update(["critic."], norm=1.0), "the weights are new"
    changed = flat.weights != before
    assert changed[-4:].all() and not changed[:-4].any()
    torch.testing.assert_close(flat.weights[-4:], before[-4:] - 0.5)
    assert set(one.optimizers) == {"critic."}
    one.update(["actor.", "critic."], norm=1.0)
    torch.testing.assert_close(flat.weights, before - torch.tensor([0.5] * 8 + [1.0] * 4))


@pytest.mark.parametrize(("clip", "factor"), [(0.0, 1.0), (10.0, 1.0), (1.0, 0.2)])
def test_the_gradient_is_clipped_to_its_norm(clip: float, factor: float) -> None:
    flat = Flat.of(nn.Linear(2, 1, bias=False))
    before = flat.weights.clone()
    flat.gradient.copy_(torch.tensor([3.0, 4.0]))
    owned(flat, lr=1.0, clip_norm=clip).update([""], norm=5.0)
    torch.testing.assert_close(flat.weights, before - factor * torch.tensor([3.0, 4.0]))


def test_the_learning_rate_is_read_at_every_update() -> None:
    flat, rates = Flat.of(nn.Linear(1, 1, bias=False)), iter([1.0, 0.25])
    one = Owned(flat, optim.SGD, lambda: next(rates), clip_norm=0.0)
    start = flat.weights.item()
    flat.gradient.fill_(1.0)
    one.update([""], norm=1.0)
    assert flat.weights.item() == pytest.approx(start - 1)
    one.update([""], norm=1.0)
    assert flat.weights.item() == pytest.approx(start - 1.25)


def test_its_state_is_by_group_and_a_restored_one_goes_on_bit_for_bit() -> None:
    one, other = (owned(Flat.of(two_groups()), optim.Adam, eps=1e-5) for _ in range(2))
    groups = ["critic.", "actor."]
    for seed in range(3):
        one.flat.gradient.copy_(torch.randn(12, generator=torch.Generator().manual_seed(seed)))
        one.update(groups, norm=1.0)
    state = {name: np.array(x) for name, x in one.state().items()}
    assert set(state) == {f"{group}/{name}" for group in groups for name in ("mean", "square", "steps")}
    other.load_state(state)
    other.flat.weights.copy_(one.flat.weights)
    for updater in (one, other):
        updater.flat.gradient.fill_(0.5)
        updater.update(groups, norm=1.0)
    assert torch.equal(one.flat.weights, other.flat.weights)
    assert Owned(one.flat, optim.SGD, lambda: 1.0, 0.0).state() == {}
