"""Networks: torsos for vectors and pixels, and heads. Integers become floats here; uint8 is scaled to [0, 1]."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from veldt import callables
from veldt.errors import UserError
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, ArraySpec


class MLP(nn.Module):
    """Linear layers with ReLU between and after them: [B, ...] -> [B, hidden[-1]]."""

    def __init__(self, inputs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        sizes = (inputs, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.features = sizes[-1]

    def forward(self, x: Tensor) -> Tensor:
        x = as_float(x).reshape(len(x), -1)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = F.relu(F.linear(x, layer.weight, layer.bias))  # half the time of calling a small layer is in the call
        return x


class NormedMLP(nn.Module):
    """Linear, layer norm, tanh; then linear layers with ReLU, and a linear output: [B, inputs] -> [B, outputs].

    The output layer begins near 0 (Lillicrap et al. 2016), so that a tanh or a value on top of it does.
    """

    def __init__(self, inputs: int, hidden: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        sizes = (inputs, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.norm = nn.LayerNorm(sizes[1]) if hidden else nn.Identity()
        self.output = nn.Linear(sizes[-1], outputs)
        for parameter in self.output.parameters():
            nn.init.uniform_(parameter, -3e-3, 3e-3)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(self.norm(layer(x))) if i == 0 else F.relu(layer(x))
        y: Tensor = self.output(x)
        return y


class ConvNet(nn.Module, ABC):
    """Convolutions, then one linear layer: [B, channels, H, W] -> [B, features]; both rectified.

    With `channels_last` it takes [B, ..., H, W, C] as cameras and renderers give it. History becomes channels.
    """

    in_bfloat16 = False  # it computes so; weights and features are float32 all the same

    def __init__(self, image: Image, features: int) -> None:
        super().__init__()
        self.image, self.features = image, features
        self.layers(image.channels)
        try:
            with torch.no_grad():
                flat = self.convolve(torch.zeros(1, image.channels, image.height, image.width)).flatten(1).shape[1]
        except RuntimeError:
            size = f"{image.height} x {image.width}"
            raise UserError(
                f"Images of {size} are too small for {type(self).__name__}; try convnet minatar or mlp."
            ) from None
        self.linear = nn.Linear(flat, features)

    @abstractmethod
    def layers(self, channels: int) -> None: ...

    @abstractmethod
    def convolve(self, x: Tensor) -> Tensor: ...

    def forward(self, x: Tensor) -> Tensor:
        image = self.image
        x = x.movedim(-1, -3).contiguous() if image.channels_last else x
        x = x.reshape(len(x), image.channels, image.height, image.width)
        if not self.in_bfloat16:
            return F.relu(self.linear(self.convolve(x).flatten(1)))
        with torch.autocast(x.device.type, torch.bfloat16):
            return F.relu(self.linear(self.convolve(x).flatten(1))).float()


class FirstConv(nn.Conv2d):
    """The convolution that sees the pixels: [B, C, H, W], floats or bytes.

    A GPU's matrix units want many channels, and few are what images have. Where the stride s divides the kernel and the
    image, squares of s x s pixels are the channels there: the same sums, with a stride of 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(as_float(x))
        if self.folds(x):
            return self.folded(x)
        return super().forward(as_float(x.contiguous(memory_format=torch.channels_last)))  # as its kernels want it

    def folds(self, x: Tensor) -> bool:
        s = self.stride[0]
        return s > 1 and not any(n % s for n in (*self.kernel_size, *x.shape[2:])) and self.padding == (0, 0)

    def folded(self, x: Tensor) -> Tensor:
        s, weight = self.stride[0], self.weight
        if x.dtype == torch.uint8:  # exact in bfloat16 as long as they are whole numbers
            weight = weight * (1 / 255)
        x = _squares(x, s).permute(0, 2, 4, 1, 3, 5)  # [B, H / s, W / s, C, s, s]
        weight = _squares(weight, s).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)  # [out, C s s, kernel / s, kernel / s]
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32
        x = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)  # turned and converted in one go
        return F.conv2d(x.flatten(3).movedim(3, 1), weight, self.bias)


def _squares(x: Tensor, s: int) -> Tensor:
    """[N, C, H, W] -> [N, C, H / s, s, W / s, s]"""
    n, c, h, w = x.shape
    return x.view(n, c, h // s, s, w // s, s)


class Image(NamedTuple):
    """What a convolutional network takes."""

    channels: int
    height: int
    width: int
    channels_last: bool = False


class NatureCNN(ConvNet):
    """Mnih et al. 2015: conv 32 8x8/4, 64 4x4/2, 64 3x3/1, linear 512."""

    def __init__(self, image: Image) -> None:
        super().__init__(image, 512)

    def layers(self, channels: int) -> None:
        self.conv1 = FirstConv(channels, 32, 8, 4)
        self.conv2 = nn.Conv2d(32, 64, 4, 2)
        self.conv3 = nn.Conv2d(64, 64, 3, 1)

    def convolve(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return F.relu(self.conv3(x))


class ImpalaCNN(ConvNet):
    """Espeholt et al. 2018, the shallow one (Mnih et al. 2013, 2016): conv 16 8x8/4, 32 4x4/2, linear 256."""

    def __init__(self, image: Image) -> None:
        super().__init__(image, 256)

    def layers(self, channels: int) -> None:
        self.conv1 = FirstConv(channels, 16, 8, 4)
        self.conv2 = nn.Conv2d(16, 32, 4, 2)

    def convolve(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))))


class MinAtarCNN(ConvNet):
    """Young and Tian 2019: conv 16 3x3/1, linear 128."""

    def __init__(self, image: Image) -> None:
        super().__init__(image, 128)

    def layers(self, channels: int) -> None:
        self.conv = FirstConv(channels, 16, 3, 1)

    def convolve(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


class ImpalaResNet(ConvNet):
    """Espeholt et al. 2018, the deep one: three sections of 16, 32, 32 channels, linear 256.

    A section is conv 3x3, max pooling 3x3/2 and two residual blocks; the last is rectified.
    """

    def __init__(self, image: Image) -> None:
        super().__init__(image, 256)

    def layers(self, channels: int) -> None:
        sizes = (channels, 16, 32, 32)
        kinds = (FirstConv, nn.Conv2d, nn.Conv2d)
        self.sections = nn.ModuleList(kind(a, b, 3, padding=1) for kind, (a, b) in zip(kinds, pairwise(sizes), strict=True))
        self.blocks = nn.ModuleList(nn.ModuleList(ResidualBlock(size) for _ in range(2)) for size in sizes[1:])

    def convolve(self, x: Tensor) -> Tensor:
        for section, blocks in zip(self.sections, self.blocks, strict=True):
            x = F.max_pool2d(section(x), 3, 2, padding=1)
            assert isinstance(blocks, nn.ModuleList)
            for block in blocks:
                x = block(x)
        return F.relu(x)


class ResidualBlock(nn.Module):
    """x + conv(relu(conv(relu(x)))), 3x3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv2(F.relu(self.conv1(F.relu(x))))
        return x + y


class Concat(nn.Module):
    """A torso for each key of a Dict observation; their features side by side."""

    def __init__(self, torsos: dict[str, nn.Module]) -> None:
        super().__init__()
        self.keys = list(torsos)
        self.torsos = nn.ModuleList(torsos.values())
        self.features = sum(features_of(torso) for torso in torsos.values())

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.cat([torso(x[key]) for key, torso in zip(self.keys, self.torsos, strict=True)], 1)


class QHead(nn.Module):
    """[..., features] -> [..., actions]. Dueling: q = v + a - mean over actions of a (Wang et al. 2016).

    With `hidden` each of the two is a network of one hidden layer.
    """

    def __init__(self, features: int, actions: int, dueling: bool, hidden: int = 0) -> None:
        super().__init__()
        self.advantage = self._stream(features, hidden, actions)
        self.value = self._stream(features, hidden, 1) if dueling else None

    def _stream(self, features: int, hidden: int, outputs: int) -> nn.Module:
        if not hidden:
            return nn.Linear(features, outputs)
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, outputs))

    def forward(self, x: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(x)
        if self.value is None:
            return advantage
        value: Tensor = self.value(x)
        return value + advantage - advantage.mean(-1, keepdim=True)


class QNetwork(nn.Module):
    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.torso, self.head = torso, head

    def forward(self, obs: Any) -> Tensor:
        q: Tensor = self.head(self.torso(obs))
        return q


class LSTM(nn.Module):
    """A recurrent core whose state is zero wherever an episode begins: [B, T, inputs] -> [B, T, size].

    The gates are torch's: in, forget, new and out; the forget gate begins open (a bias of 1).
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.cell = nn.LSTM(inputs, size, batch_first=True)
        with torch.no_grad():
            bias = self.cell.bias_ih_l0
            assert isinstance(bias, nn.Parameter)
            bias[size : 2 * size] += 1

    def forward(self, x: Tensor, h: Tensor, c: Tensor, first: Array | None) -> tuple[Tensor, Tensor, Tensor]:
        """From the state h, c [B, size] before the first row; returns outputs and the state after the last row.

        Where `first`, an array [B, T], the state before that row is zero. None: the rows go on from the state given.
        """
        if first is not None and first.any():
            return self.outputs(x, h, c, first), *self.after(x, h, c, first)
        y, (h, c) = self.cell(x, (h[None], c[None]))
        return y, h[0], c[0]

    def outputs(self, x: Tensor, h: Tensor, c: Tensor, first: Array | None) -> Tensor:
        """The outputs alone. The kernel knows no episodes, so each is a sequence of its own."""
        if first is None or not first.any():
            y: Tensor = self.cell(x, (h[None], c[None]))[0]
            return y
        rows, place, lane, fresh = (on_device(a, x.device) for a in episodes(first))
        h, c = (s[lane].masked_fill(fresh[:, None], 0) for s in (h, c))
        y, _ = self.cell(x.flatten(0, 1)[rows], (h[None], c[None]))
        y = y.flatten(0, 1)[place]
        return y

    def after(self, x: Tensor, h: Tensor, c: Tensor, first: Array | None) -> tuple[Tensor, Tensor]:
        """The state alone. It depends on the last episode only."""
        if first is None or not first.any():
            _, (h, c) = self.cell(x, (h[None], c[None]))
            return h[0], c[0]
        steps = first.shape[1]
        begin = np.where(first.any(1), steps - 1 - first[:, ::-1].argmax(1), 0)  # [B], its first row here
        rows = np.minimum(begin[:, None] + np.arange(steps - begin.min()), steps - 1)
        began = np.asarray(first.any(1))
        fresh = on_device(began, x.device)[:, None]
        last = x.gather(1, on_device(rows, x.device)[:, :, None].expand(-1, -1, x.shape[2]))
        packed = pack_padded_sequence(last, torch.from_numpy(steps - begin), batch_first=True, enforce_sorted=False)
        _, (h, c) = self.cell(packed, (h.masked_fill(fresh, 0)[None], c.masked_fill(fresh, 0)[None]))
        return h[0], c[0]


def episodes(first: Array) -> tuple[Array, Array, Array, Array]:
    """The episodes, or parts of them, in rows [B, T]: E sequences, none longer than L.

    Returns: rows [E, L], where each comes from in the flattened rows (beyond its end: anywhere); place [B, T], where each
    row is in the flattened sequences; lane [E]; fresh [E], whether it begins here.
    """
    begins = first.copy()
    begins[:, 0] = True
    at = np.flatnonzero(begins)  # in flattened rows
    length = int(np.diff(at, append=first.size).max())
    rows = np.minimum(at[:, None] + np.arange(length), first.size - 1)
    number = begins.reshape(-1).cumsum() - 1  # of the episode that a row belongs to
    place = number * length + np.arange(first.size) - at[number]
    return rows, place.reshape(first.shape), at // first.shape[1], first.reshape(-1)[at]


def each(obs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Of an observation, or of every part of one that is a dict."""
    return {key: function(x) for key, x in obs.items()} if isinstance(obs, dict) else function(obs)


def flat_rows(obs: Any) -> Any:
    """Rows [B, T, ...] as [B * T, ...]."""
    return each(obs, lambda x: x.flatten(0, 1))


def recurrent_input(features: Tensor, taken: Tensor, reward: Tensor) -> Tensor:
    """What an LSTM sees: features [B, T, F], the last action [B, T, E], and the last reward [B, T], clipped to [-1, 1]."""
    return torch.cat((features, taken, reward.clamp(-1, 1)[:, :, None]), 2)


CONVNETS: dict[str, Callable[[Image], nn.Module]] = {
    "nature": NatureCNN,
    "minatar": MinAtarCNN,
    "impala": ImpalaResNet,
    "impala-shallow": ImpalaCNN,
}


def torso_for(
    env: EnvSpec,
    history: int,
    stacked: tuple[str, ...],
    hidden: tuple[int, ...],
    convnet: str = "auto",
    large: str = "nature",
) -> nn.Module:
    """A convolutional network for images, an MLP for all else; both side by side for a Dict.

    `auto`: uint8 or bool images of at least 36 x 36 get the one named by `large`, small ones with channels (MinAtar's) the
    MinAtar CNN. A named one is for a single observation, and for the large images of a Dict.
    """
    torsos: dict[str, nn.Module] = {}
    for name, column in env.observation.items():
        key = name.removeprefix("obs/")
        stack = history if not stacked or key in stacked else 1
        image = _image(column)
        kind = _fitting(image, column)
        if convnet != "auto" and (name == "obs" or kind == "large"):
            kind = convnet
        elif kind == "large":
            kind = large
        if kind == "mlp":
            torsos[key] = MLP(stack * int(np.prod(column.shape)), hidden)
        elif image is None:
            raise UserError(f"{env.name} has the observation {list(column.shape)}, which is no image for convnet {kind}.")
        else:
            torsos[key] = CONVNETS[kind](image._replace(channels=stack * image.channels))
    return torsos["obs"] if "obs" in env.observation else Concat(torsos)


def made_by(name: str, env: EnvSpec, see: Callable[[dict[str, Tensor]], Any], history: int) -> tuple[nn.Module, Tensor]:
    """The network that `module:callable` makes, and what it gives for two blank observations (as `see` shows them)."""
    make = callables.find(name)
    if make is None:
        raise UserError(f"There is no {name!r} to make a network with.")
    blank = {key: torch.from_numpy(np.zeros((2, history, *c.shape), c.dtype)) for key, c in env.step.items()}
    try:
        net: nn.Module = make(env)
        with torch.no_grad():
            out: Tensor = net(see(blank))
        single = all(parameter.dtype == torch.float32 for parameter in net.parameters())
    except Exception as error:
        raise UserError(f"The network of {name} cannot be made or run: {type(error).__name__}: {error}") from error
    if not single:
        raise UserError(f"The network of {name} must have float32 parameters.")
    return net, out


def features_of(torso: nn.Module) -> int:
    """The width of a torso's output."""
    assert isinstance(torso.features, int), torso
    return torso.features


def _image(column: ArraySpec) -> Image | None:
    """A column [H, W], [C, H, W] or [H, W, C]: equal sides are height and width, else channels are last if at most 4."""
    shape = column.shape
    if len(shape) not in (2, 3) or 0 in shape:
        return None
    if len(shape) == 2:
        return Image(1, *shape)
    squares = (shape[0] == shape[1], shape[1] == shape[2])
    channels_last = squares[0] if squares[0] != squares[1] else shape[2] <= 4 or column.dtype == np.bool_
    height, width = shape[:2] if channels_last else shape[1:]
    return Image(shape[2] if channels_last else shape[0], height, width, channels_last)


def _fitting(image: Image | None, column: ArraySpec) -> str:
    if image is None or column.dtype not in (np.uint8, np.bool_):
        return "mlp"
    side = min(image.height, image.width)
    if side >= 36:
        return "large"
    certain = image.height == image.width or image.channels <= 4 or column.dtype == np.bool_
    return "minatar" if len(column.shape) == 3 and side >= 5 and certain else "mlp"


def on_device(x: Array, device: torch.device) -> Tensor:
    """Without waiting for what a GPU is doing: what is pageable is copied aside at once, what is pinned must stay."""
    return torch.from_numpy(x).to(device, non_blocking=True)


def as_float(x: Tensor) -> Tensor:
    if x.dtype == torch.uint8:
        return x.float().mul_(1 / 255)
    return x if x.dtype == torch.float32 else x.float()
