"""A network as one vector, and the service that hands out weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import Normed
from torch import nn

from veldt.learning import params
from veldt.learning.params import LatestParams, Weights


def test_flatten_keeps_values_and_makes_views() -> None:
    net = Normed()
    before = {name: x.clone() for name, x in net.state_dict().items()}
    vector = params.flatten(net)
    assert len(vector) == sum(x.numel() for x in before.values() if x.is_floating_point())
    for name, x in net.state_dict().items():
        assert torch.equal(x, before[name]), name
    with torch.no_grad():
        vector.fill_(0.5)
    for name, x in net.state_dict().items():
        assert not x.is_floating_point() or (x == 0.5).all(), name


def test_the_forward_pass_moves_buffers_inside_the_vector() -> None:
    net = Normed()
    vector = params.flatten(net)
    before = vector.clone()
    net(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) + 3)
    changed = (vector != before).nonzero().flatten().tolist()
    buffers = len(vector) - sum(p.numel() for p in net.parameters())
    assert changed == list(range(len(vector) - buffers, len(vector))), "the buffers come last, and only they change"


def test_backward_adds_to_one_gradient_vector() -> None:
    net, plain = Normed(), Normed()
    plain.load_state_dict(net.state_dict())
    params.flatten(net)
    gradient = params.flatten_gradients(net)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):  # twice: gradients add up in the same vector
        net(x).square().sum().backward()
        plain(x).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient, expected)
    gradient.zero_()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


def test_every_group_is_a_slice() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 1)})
    vector = params.flatten(net)
    assert params.group_slice(net, "") == slice(0, len(vector))
    assert params.group_slice(net, "a.") == slice(0, 8)
    assert params.group_slice(net, "b.") == slice(8, 14)
    with torch.no_grad():
        vector[params.group_slice(net, "b.")] = 7
    assert all((p == 7).all() for p in net["b"].parameters())
    assert not any((p == 7).any() for p in net["c"].parameters())
    with pytest.raises(AssertionError, match="no parameter is named"):
        params.group_slice(net, "z")


def test_export_and_restore_are_exact_and_what_is_restored_is_a_copy() -> None:
    net, other = Normed(), Normed()
    net(torch.randn(16, 8))
    params.flatten(net), params.flatten(other)
    state = {name: x.copy() for name, x in params.export(net).items()}
    assert {name: x.dtype for name, x in state.items()}["norm.num_batches_tracked"] == np.int64
    params.restore(other, state)
    for name, x in other.state_dict().items():
        assert torch.equal(x, net.state_dict()[name]), name
    with torch.no_grad():
        net.q.weight.zero_()
    assert state["q.weight"].any()
    assert torch.equal(other.q.weight, torch.from_numpy(state["q.weight"]))


def test_the_newest_weights_win_and_are_handed_out_once() -> None:
    service = LatestParams()
    assert service.pull(-1) is None
    service.publish(Weights(0, np.zeros(2, np.float32)))
    first = service.pull(-1)
    assert first is not None and first.version == 0
    assert service.pull(0) is None
    service.publish(Weights(5, np.ones(2, np.float32)))
    newer = service.pull(0)
    assert newer is not None and newer.version == 5 and newer.vector.all()
    assert not first.vector.any()
