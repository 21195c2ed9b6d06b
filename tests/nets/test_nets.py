"""Networks: the published sizes, what happens to integers, where history and Dict keys go, and the dueling head."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import examples, lstm_cell
from torch import nn
from torch.nn import functional as F

from veldt.algorithms.dqn import DQN
from veldt.errors import UserError
from veldt.learning.params import export, restore
from veldt.nets.networks import LSTM, QHead, QNetwork, Rows, episodes, recurrent_input
from veldt.nets.torsos import (
    MLP,
    Concat,
    FirstConv,
    Image,
    ImpalaCNN,
    ImpalaResNet,
    MinAtarCNN,
    NatureCNN,
    ResidualBlock,
    each,
    torso_for,
    use_bfloat16,
)
from veldt.records.step import EnvSpec
from veldt.records.tree import spec


def env_of(actions=4, **columns):
    return EnvSpec("made up", columns, spec((), np.int64), spaces.Discrete(actions))


def size(net):
    return sum(p.numel() for p in net.parameters())


SCREEN = spec((84, 84), np.uint8)
COLOUR = spec((3, 84, 84), np.uint8)
VECTOR = spec((5,), np.float32)


# The Nature CNN


def test_nature_cnn_has_the_published_layers():
    net = DQN(history=4).network(env_of(obs=SCREEN))
    shapes = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda layer, x, y: shapes.append(tuple(y.shape[1:])))
    q = net(torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    assert shapes == [(32, 20, 20), (64, 9, 9), (64, 7, 7), (512,), (4,)]
    assert q.shape == (2, 4)
    # 8x8x4x32 + 32, 4x4x32x64 + 64, 3x3x64x64 + 64, 7x7x64x512 + 512, 512x4 + 4
    assert size(net) == 8_224 + 32_832 + 36_928 + 1_606_144 + 2_052 == 1_686_180


def test_nature_cnn_is_rectified_after_every_layer():
    torch.manual_seed(0)
    net = NatureCNN(Image(1, 84, 84))
    inputs = []
    for layer in (net.conv2, net.conv3, net.linear):
        layer.register_forward_hook(lambda layer, x, y: inputs.append(x[0]))
    features = net(torch.randint(0, 256, (3, 1, 84, 84), dtype=torch.uint8))
    assert features.shape == (3, 512)
    for x in (*inputs, features):
        assert (x >= 0).all() and (x == 0).any() and (x > 0).any()


@pytest.mark.parametrize("make", [lambda: NatureCNN(Image(1, 40, 44)), lambda: MLP(40 * 44, (16,))])
def test_uint8_is_scaled_to_one_and_other_numbers_are_taken_as_they_are(make):
    torch.manual_seed(0)
    net = make()
    x = torch.randint(0, 256, (3, 1, 40, 44))
    torch.testing.assert_close(net(x.to(torch.uint8)), net(x.float() / 255))
    torch.testing.assert_close(net(x), net(x.float()))  # int64
    torch.testing.assert_close(net(x.double()), net(x.float()))
    assert not torch.allclose(net(x), net(x.float() / 255))


# MLP


def test_mlp_is_linear_layers_with_relu_after_each():
    net = MLP(2, (2, 2))
    weights = [([[1.0, -1.0], [2.0, 0.0]], [0.0, -1.0]), ([[1.0, 1.0], [-3.0, 1.0]], [0.5, 0.0])]
    with torch.no_grad():
        for layer, (weight, bias) in zip(net.layers, weights, strict=True):
            layer.weight.copy_(torch.tensor(weight))
            layer.bias.copy_(torch.tensor(bias))
    # (3, 1) -> (2, 5) -> (7.5, -1); (1, 3) -> (-2, 1) -> (0, 1) -> (1.5, 1)
    assert net(torch.tensor([[3.0, 1.0], [1.0, 3.0]])).tolist() == [[7.5, 0.0], [1.5, 1.0]]


def test_mlp_sizes():
    net = DQN(hidden=(32, 16)).network(env_of(obs=VECTOR))
    assert net(torch.zeros(7, 5)).shape == (7, 4)
    assert size(net) == 5 * 32 + 32 + 32 * 16 + 16 + 16 * 4 + 4
    assert MLP(6, ()).features == 6 and MLP(6, ())(torch.ones(2, 3, 2)).shape == (2, 6)


# Which torso, and how wide


@pytest.mark.parametrize(
    ("column", "history", "channels"), [(SCREEN, 1, 1), (SCREEN, 4, 4), (COLOUR, 1, 3), (COLOUR, 4, 12)]
)
def test_history_becomes_channels_of_an_image(column, history, channels):
    torso = torso_for(env_of(obs=column), history, (), (8,))
    assert isinstance(torso, NatureCNN) and torso.conv1.in_channels == channels
    stack = (history,) if history > 1 else ()
    assert torso(torch.zeros(2, *stack, *column.shape, dtype=torch.uint8)).shape == (2, 512)


def test_the_newest_frame_is_the_last_channel():
    """A network that reads one channel alone sees the frame that `observe` put there."""
    torso = torso_for(env_of(obs=SCREEN), 4, (), ())
    frames = torch.stack([torch.full((84, 84), 10 * (k + 1), dtype=torch.uint8) for k in range(4)])[None]
    rows = {"obs": frames, "first": torch.zeros(1, 4, dtype=torch.bool), "valid": torch.ones(1, 4, dtype=torch.bool)}
    seen = []
    torso.conv1.register_forward_hook(lambda layer, x, y: seen.append(x[0]))
    torso(DQN(history=4).observe(rows, 3))
    assert seen[0][0, :, 0, 0].tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize("history", [1, 3])
def test_vectors_and_small_images_get_an_mlp(history):
    for column in (VECTOR, spec((10, 5), np.uint8), spec((84, 84), np.float32)):
        torso = torso_for(env_of(obs=column), history, (), (8,))
        assert isinstance(torso, MLP) and torso.layers[0].in_features == history * np.prod(column.shape)


def test_a_dict_observation_has_a_torso_for_each_key_side_by_side():
    env = env_of(**{"obs/screen": SCREEN, "obs/speed": VECTOR})
    torso = torso_for(env, 4, ("screen",), (8,))
    assert isinstance(torso, Concat) and torso.features == 512 + 8
    cnn, mlp = torso.torsos
    assert cnn.conv1.in_channels == 4 and mlp.layers[0].in_features == 5, "only the named key is stacked"
    every = torso_for(env, 4, (), (8,))
    assert every.torsos[1].layers[0].in_features == 4 * 5, "none named: all are"
    torch.manual_seed(0)
    obs = {"speed": torch.randn(3, 5), "screen": torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)}
    out = torso(obs)
    assert out.shape == (3, 520)
    torch.testing.assert_close(out, torch.cat([cnn(obs["screen"]), mlp(obs["speed"])], 1))


def test_a_dict_network_goes_to_action_values():
    env = env_of(actions=3, **{"obs/a": spec((2, 2), np.float32), "obs/b": spec((1,), np.int64)})
    net = DQN(hidden=(8,)).network(env)
    assert net({"a": torch.zeros(6, 2, 2), "b": torch.zeros(6, 1, dtype=torch.int64)}).shape == (6, 3)


# Dueling


def test_dueling_subtracts_the_mean_over_actions():
    head = QHead(2, 3, dueling=True)
    with torch.no_grad():
        head.advantage.weight.copy_(torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, 0.0]]))
        head.advantage.bias.zero_()
        head.value.weight.copy_(torch.tensor([[0.0, 10.0]]))
        head.value.bias.zero_()
    # value 10 y; advantages x, 2x, 6x with mean 3x
    assert head(torch.tensor([[1.0, 1.0], [2.0, 5.0]])).tolist() == [[8.0, 9.0, 13.0], [46.0, 48.0, 56.0]]


@pytest.mark.parametrize("dueling", [False, True])
def test_the_values_of_a_state_do_not_depend_on_its_batch_mates(dueling):
    torch.manual_seed(0)
    net = QNetwork(MLP(5, (16,)), QHead(16, 4, dueling))
    x = torch.randn(6, 5)
    torch.testing.assert_close(torch.cat([net(row[None]) for row in x]), net(x))
    torch.testing.assert_close(net(x[[3, 0]]), net(x)[[3, 0]])


def env_with(shape: tuple[int, ...], dtype: type = np.uint8) -> EnvSpec:
    return EnvSpec("any", {"obs": spec(shape, dtype)}, spec((), np.int64), spaces.Discrete(3))


@pytest.mark.parametrize("history", [1, 4])
def test_colour_images_may_have_their_channels_last(history: int) -> None:
    """The same picture gives the same features, whether it is [C, H, W] or [H, W, C]."""
    first = torso_for(env_with((3, 84, 84)), history, (), (16,))
    last = torso_for(env_with((84, 84, 3)), history, (), (16,))
    last.load_state_dict(first.state_dict())
    x = torch.randint(0, 255, (2, history, 3, 84, 84) if history > 1 else (2, 3, 84, 84), dtype=torch.uint8)
    torch.testing.assert_close(first(x), last(x.movedim(-3, -1)))


def test_a_single_number_is_an_observation() -> None:
    torso = torso_for(env_with((), np.float32), 1, (), (16,))
    assert torso(torch.zeros(5)).shape == (5, 16)


def test_a_dict_with_the_single_key_obs_is_still_a_dict() -> None:
    torso = torso_for(env_of(**{"obs/obs": VECTOR}), 1, (), (16,))
    assert torso({"obs": torch.zeros(2, 5)}).shape == (2, 16)


# MinAtar and IMPALA


def output_shapes(net: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda layer, x, y: shapes.append(tuple(y.shape[1:])))
    net(x)
    return shapes


def test_minatar_cnn_has_the_published_layers() -> None:
    net = DQN().network(env_of(actions=6, obs=spec((10, 10, 4), np.bool_)))
    assert output_shapes(net, torch.zeros(2, 10, 10, 4, dtype=torch.bool)) == [(16, 8, 8), (128,), (6,)]
    assert size(net) == (3 * 3 * 4 * 16 + 16) + (8 * 8 * 16 * 128 + 128) + (128 * 6 + 6)


def test_bool_pictures_have_their_channels_last_however_many() -> None:
    torch.manual_seed(0)
    torso = torso_for(env_of(obs=spec((10, 10, 7), np.bool_)), 1, (), (8,))
    assert isinstance(torso, MinAtarCNN)
    x = torch.rand(3, 10, 10, 7) < 0.3
    by_hand = torch.relu(torso.conv(x.permute(0, 3, 1, 2).float()))
    torch.testing.assert_close(torso(x), torch.relu(torso.linear(by_hand.flatten(1))))


def test_impala_resnet_has_the_published_layers() -> None:
    """Espeholt et al. 2018, figure 3 right: per section a convolution, a pooling to half the size, two residual blocks."""
    net = ImpalaResNet(Image(4, 84, 84))
    shapes = output_shapes(net, torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
    expected = []
    for channels, before, after in ((16, 84, 42), (32, 42, 21), (32, 21, 11)):
        expected += [(channels, before, before)] + 4 * [(channels, after, after)]
    assert shapes == [*expected, (256,)]
    convolutions = sum(9 * a * b + b for a, b in ((4, 16), (16, 32), (32, 32))) + 4 * sum(
        9 * c * c + c for c in (16, 32, 32)
    )
    assert size(net) == convolutions + 32 * 11 * 11 * 256 + 256


def test_the_shallow_impala_cnn_has_the_published_layers() -> None:
    """Espeholt et al. 2018, figure 3 left: the convolutions of Mnih et al. 2013, and a linear layer of 256."""
    net = torso_for(env_of(obs=SCREEN), 4, (), (8,), large="impala-shallow")
    assert isinstance(net, ImpalaCNN) and net.features == 256
    x = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    assert output_shapes(net, x) == [(16, 20, 20), (32, 9, 9), (256,)]
    # 8x8x4x16 + 16, 4x4x16x32 + 32, 9x9x32x256 + 256
    assert size(net) == 4_112 + 8_224 + 663_808 == 676_144
    y = torch.relu(net.conv2(torch.relu(net.conv1(x.float() / 255))))
    torch.testing.assert_close(net(x), torch.relu(net.linear(y.flatten(1))))


def test_which_network_large_pictures_get_by_themselves() -> None:
    """And a named one comes before that."""
    assert isinstance(torso_for(env_of(obs=SCREEN), 1, (), (8,)), NatureCNN)
    assert isinstance(torso_for(env_of(obs=SCREEN), 1, (), (8,), "impala", large="impala-shallow"), ImpalaResNet)
    small = torso_for(env_of(obs=spec((10, 10, 4), np.bool_)), 1, (), (8,), large="impala-shallow")
    assert isinstance(small, MinAtarCNN)


def test_a_residual_block_adds_to_its_input() -> None:
    block = ResidualBlock(2)
    with torch.no_grad():
        for layer in (block.conv1, block.conv2):
            layer.weight.zero_()
            layer.bias.zero_()
            for channel in range(2):
                layer.weight[channel, channel, 1, 1] = 2.0
    x = torch.tensor([3.0, -5.0]).reshape(1, 2, 1, 1).expand(1, 2, 4, 4)
    # x + 2 relu(2 relu(x)): 3 + 12, and -5 + 0, which a rectified skip would have lost
    torch.testing.assert_close(block(x), torch.tensor([15.0, -5.0]).reshape(1, 2, 1, 1).expand(1, 2, 4, 4))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nature", NatureCNN),
        ("impala", ImpalaResNet),
        ("impala-shallow", ImpalaCNN),
        ("minatar", MinAtarCNN),
        ("mlp", MLP),
    ],
)
def test_the_network_for_images_can_be_named(name: str, kind: type) -> None:
    net = DQN(history=2, convnet=name).network(env_of(obs=spec((40, 40), np.uint8)))  # type: ignore[arg-type]
    assert isinstance(net.torso, kind)
    assert net(torch.zeros(3, 2, 40, 40, dtype=torch.uint8)).shape == (3, 4)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((10, 10, 4), np.uint8, (MinAtarCNN, 4)),
        ((4, 10, 10), np.uint8, (MinAtarCNN, 4)),
        ((10, 10, 8), np.uint8, (MinAtarCNN, 8)),
        ((17, 9, 9), np.bool_, (MinAtarCNN, 17)),
        ((210, 160, 3), np.uint8, (NatureCNN, 3)),
        ((3, 210, 160), np.uint8, (NatureCNN, 3)),
        ((10, 6, 8), np.uint8, (MLP, None)),  # which are the channels?
        ((3, 3, 100), np.uint8, (MLP, None)),
    ],
)
def test_which_pictures_get_which_network(shape: tuple[int, ...], dtype: type, expected: tuple[type, int | None]) -> None:
    torso = torso_for(env_with(shape, dtype), 1, (), (8,))
    assert type(torso) is expected[0]
    assert not hasattr(torso, "image") or torso.image.channels == expected[1]
    assert torso(torch.zeros(2, *shape, dtype=torch.bool if dtype is np.bool_ else torch.uint8)).shape[0] == 2


@pytest.mark.parametrize(
    ("env", "name", "says"),
    [
        (env_with((10, 10, 4)), "nature", "10 x 10 are too small for NatureCNN"),
        (env_with((2, 2, 3)), "minatar", "too small for MinAtarCNN"),
        (env_with((5,), np.float32), "impala", "convnet impala needs an image"),
    ],
)
def test_a_named_network_that_does_not_fit_is_refused_in_words(env: EnvSpec, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        torso_for(env, 1, (), (8,), name)


def test_a_named_network_is_for_the_large_pictures_of_a_dict() -> None:
    env = env_of(**{"obs/screen": SCREEN, "obs/mask": spec((5, 5), np.uint8), "obs/speed": VECTOR})
    kinds = [type(torso) for torso in torso_for(env, 1, (), (8,), "impala").torsos]
    assert kinds == [ImpalaResNet, MLP, MLP]


def test_float_pictures_get_a_convolutional_network_by_themselves_if_they_have_channels() -> None:
    assert isinstance(torso_for(env_with((84, 84, 3), np.float32), 1, (), (8,)), NatureCNN)
    assert isinstance(torso_for(env_with((84, 84), np.float32), 1, (), (8,)), MLP), "a table of numbers, perhaps"
    assert isinstance(torso_for(env_with((84, 84), np.float32), 1, (), (8,), "nature"), NatureCNN)


def test_weights_of_another_network_are_refused_in_words() -> None:
    small, large = MLP(3, (4,)), MLP(3, (5,))
    restore(small, export(MLP(3, (4,))))
    for other in (export(large), {}):
        with pytest.raises(UserError, match=r"a different network: layers.0.weight"):
            restore(small, other)


# LSTM


def rows_alone(net: LSTM, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, first: np.ndarray) -> tuple[torch.Tensor, ...]:
    """What an LSTM gives by definition: row by row, from the state given, or from zero where an episode begins."""
    y, hs, cs = [], [], []
    for b in range(len(x)):
        before = (h[b], c[b])
        for t in range(x.shape[1]):
            if first[b, t]:
                before = (torch.zeros_like(h[b]), torch.zeros_like(c[b]))
            before = lstm_cell(x[b, t], *before, net.cell)
            y.append(before[0])
        hs.append(before[0]), cs.append(before[1])
    return torch.stack(y).unflatten(0, x.shape[:2]), torch.stack(hs), torch.stack(cs)


def lstm_and_inputs(batch: int, rows: int, inputs: int = 4, width: int = 3) -> tuple[LSTM, list[torch.Tensor]]:
    torch.manual_seed(0)
    leaves = [torch.randn(batch, rows, inputs), torch.randn(batch, width), torch.randn(batch, width)]
    return LSTM(inputs, width), [x.requires_grad_() for x in leaves]


def check_lstm(net: LSTM, leaves: list[torch.Tensor], first: np.ndarray | None) -> None:
    """Outputs, the state after them, and the gradient of all of these to weights, inputs and the state before; and the same
    for the outputs alone, and for the state alone."""
    before = None if first is None else first.copy()
    by_hand = rows_alone(net, *leaves, np.zeros(leaves[0].shape[:2], np.bool_) if first is None else first)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in by_hand]
    all_, alone, after = slice(None), slice(1), slice(1, None)
    for found, part in (
        ((net.outputs(*leaves, first), *net.after(*leaves, first)), all_),
        ((net.outputs(*leaves, first),), alone),
        (net.after(*leaves, first), after),
    ):
        expected, slopes = by_hand[part], []
        for out in (found, expected):
            total = sum(((x * w).sum() for x, w in zip(out, weights[part], strict=True)), torch.zeros(()))
            leaf = [*net.parameters(), *leaves]
            slopes.append(torch.autograd.grad(total, leaf, retain_graph=True, materialize_grads=True))
        for one, other in (*zip(found, expected, strict=True), *zip(*slopes, strict=True)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
    assert first is None or (first == before).all(), "what is given stays as it is"


@pytest.mark.parametrize("first", [None, np.zeros((3, 6), np.bool_)], ids=["None", "nowhere"])
def test_an_lstm_is_its_equations(first: np.ndarray | None) -> None:
    net, leaves = lstm_and_inputs(3, 6, 5, 7)
    check_lstm(net, leaves, first)
    for found, expected in zip(net(*leaves), (net.outputs(*leaves, first), *net.after(*leaves, first)), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("begins", [[0], [3], [5], [0, 2, 3], [1, 5]], ids=str)
def test_an_lstm_begins_anew_with_every_episode(begins: list[int]) -> None:
    """From zero; only what comes before the first of them has the state given. In the other row no episode begins."""
    first = np.zeros((2, 6), np.bool_)
    first[0, begins] = True
    check_lstm(*lstm_and_inputs(2, 6), first)


@st.composite
def beginnings(draw: Any) -> np.ndarray:
    """Where episodes begin in rows [B, T]."""
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 9)))
    often = draw(st.sampled_from([1, 2, 5]))
    flags = draw(st.lists(st.integers(0, often), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return np.array(flags).reshape(shape) == often


@settings(max_examples=examples(60), deadline=None)
@given(beginnings())
def test_an_lstm_is_its_equations_wherever_episodes_begin(first: np.ndarray) -> None:
    check_lstm(*lstm_and_inputs(*first.shape), first)


@settings(max_examples=examples(100), deadline=None)
@given(beginnings())
def test_episodes_are_sequences_of_their_own_and_every_row_is_found_again(first: np.ndarray) -> None:
    b, t = first.shape
    rows, place, lane, fresh = episodes(first)
    pieces = []  # by definition: lane, first row and the one after the last
    for i in range(b):
        pieces += [(i, start, stop) for start, stop in pairwise(sorted({0, *np.flatnonzero(first[i]).tolist(), t}))]
    longest = max(stop - start for _, start, stop in pieces)
    assert rows.shape == (len(pieces), longest) and place.shape == (b, t) and (rows >= 0).all() and (rows < b * t).all()
    for e, (i, start, stop) in enumerate(pieces):
        assert lane[e] == i and fresh[e] == first[i, start]
        assert rows[e, : stop - start].tolist() == list(range(i * t + start, i * t + stop))
        assert place[i, start:stop].tolist() == list(range(e * longest, e * longest + stop - start))


def test_an_lstm_passes_no_gradient_into_the_episode_before() -> None:
    net, (x, h, c) = lstm_and_inputs(1, 6)
    first = np.array([[False, False, False, True, False, False]])
    y = net.outputs(x, h, c, first)
    for grad in torch.autograd.grad(y[:, 3:].sum(), [x, h, c], retain_graph=True, materialize_grads=True):
        assert not grad[:, :3].any()
    assert all(grad.any() for grad in torch.autograd.grad(y[:, 2].sum(), [x, h, c]))


def test_an_lstm_cut_in_two_gives_the_same() -> None:
    net, (x, h, c) = lstm_and_inputs(2, 7)
    first = np.random.default_rng(0).random((2, 7)) < 0.3
    assert first[:, :4].any() and first[:, 4:].any()
    between = net.after(x[:, :4], h, c, first[:, :4])
    front, back = net.outputs(x[:, :4], h, c, first[:, :4]), net.outputs(x[:, 4:], *between, first[:, 4:])
    torch.testing.assert_close(torch.cat([front, back], 1), net.outputs(x, h, c, first))
    torch.testing.assert_close(net.after(x[:, 4:], *between, first[:, 4:]), net.after(x, h, c, first))


def test_the_forget_gate_begins_open() -> None:
    torch.manual_seed(0)
    net = LSTM(5, 16)
    bias = (net.cell.bias_ih_l0 + net.cell.bias_hh_l0).detach().reshape(4, 16)
    assert (bias[1] >= 0.5).all() and bias[[0, 2, 3]].abs().max() <= 0.5
    assert net.cell.weight_ih_l0.abs().max() <= 0.25 and net.cell.weight_hh_l0.abs().max() <= 0.25
    assert size(net) == 4 * 16 * (5 + 16 + 2)


# A head with hidden layers, and rows


@pytest.mark.parametrize("leading", [(5,), (2, 3)])
def test_the_streams_of_a_dueling_head_may_have_a_hidden_layer(leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    head = QHead(6, 4, dueling=True, hidden=8)
    assert size(head) == 2 * (6 * 8 + 8) + (8 * 4 + 4) + (8 + 1)
    x = torch.randn(*leading, 6)
    q = head(x)
    assert q.shape == (*leading, 4)
    for row, found in zip(x.reshape(-1, 6), q.reshape(-1, 4), strict=True):
        v, a = (
            (torch.relu(row @ s[0].weight.T + s[0].bias) @ s[2].weight.T + s[2].bias) for s in (head.value, head.advantage)
        )
        torch.testing.assert_close(found, v + a - sum(a) / 4)


def test_rows_and_their_parts() -> None:
    x, y = torch.arange(24).reshape(2, 3, 4), torch.arange(6).reshape(2, 3)
    first = np.eye(2, 3, dtype=np.bool_)
    for index in ((slice(None), slice(1, 3)), (np.array([1, 0, 1]), slice(0, 2)), np.array([1])):
        part = Rows({"a": x, "b": y}, x, y, first)[index]
        assert part.obs["a"].tolist() == part.taken.tolist() == x.numpy()[index].tolist()
        assert part.obs["b"].tolist() == part.reward.tolist() == y.numpy()[index].tolist()
        assert part.first is not None and part.first.tolist() == first[index].tolist()
    assert Rows(x, x, y, None)[:, :2].first is None
    assert each(y, lambda part: part + 1).tolist() == (y + 1).tolist()
    assert each({"y": y}, lambda part: part + 1)["y"].tolist() == (y + 1).tolist()
    assert each({"y": y}, torch.add, {"y": y})["y"].tolist() == each(y, torch.add, y).tolist() == (2 * y).tolist()


def test_what_an_lstm_sees_is_features_the_last_action_and_the_last_reward() -> None:
    seen = recurrent_input(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[0.0, 1.0, 0.0]]]), torch.tensor([[-7.0]]))
    assert seen.tolist() == [[[1, 2, 0, 1, 0, -7]]]
    middle = recurrent_input(torch.zeros(1, 1, 0), torch.zeros(1, 1, 0), torch.tensor([[0.25]]))
    assert middle.tolist() == [[[0.25]]]


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("channels", "kernel", "stride", "side"), [(4, 8, 4, 84), (3, 4, 2, 8), (1, 6, 3, 15)])
def test_a_convolution_of_pixels_folded_or_not_is_the_convolution_of_their_part_of_255(
    channels: int, kernel: int, stride: int, side: int, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    conv = FirstConv(channels, 5, kernel, stride)
    x = torch.randint(0, 256, (2, channels, side, side + stride), dtype=torch.uint8)
    x = x if kind == torch.uint8 else x / 255
    exact = x.double() / 255 if kind == torch.uint8 else x.double()
    expected = F.conv2d(exact, conv.weight.double(), conv.bias.double(), stride).float()
    assert conv.folds(x)
    for found in (conv(x), conv.folded(x), conv.folded(x.transpose(2, 3).contiguous().transpose(2, 3))):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradients = []
    for forward in (conv, conv.folded):
        conv.zero_grad()
        forward(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in conv.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "side"), [(3, 1, 0, 8), (8, 4, 0, 82), (7, 4, 0, 84), (8, 4, 4, 84)]
)
def test_a_convolution_that_does_not_fold_says_so(kernel: int, stride: int, padding: int, side: int) -> None:
    assert not FirstConv(1, 1, kernel, stride, padding).folds(torch.zeros(1, 1, 84, side))


def test_bytes_are_exact_in_bfloat16_before_they_are_weighted() -> None:
    conv = FirstConv(1, 1, 2, 2, bias=False)
    torch.nn.init.constant_(conv.weight, 255.0)
    x = torch.arange(256, dtype=torch.uint8).reshape(64, 1, 2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        found = conv.folded(x)
    sums = x.float().sum((1, 2, 3))
    torch.testing.assert_close(found.flatten().float(), sums, rtol=2**-8, atol=0)


def test_convolutions_in_bfloat16_are_nearly_the_same_and_their_features_are_float32() -> None:
    torch.manual_seed(0)
    net = DQN(history=4).network(env_of(obs=SCREEN)).torso
    x = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    exact = net(x)
    use_bfloat16(net)
    found = net(x)
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02 * exact.abs().max().item())
    found.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
