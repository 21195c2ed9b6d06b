"""Torsos: observations -> features [B, F], which of them an environment gets, and networks made by a user's function."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veldt import callables
from veldt.errors import UserError
from veldt.nets.normalize import Moderate
from veldt.records.history import observation
from veldt.records.images import CHANNELS, LARGE, Image, image_of
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, ArraySpec, zeros


def on_device(x: Array | Tensor, device: torch.device) -> Tensor:
    """Copies to the device without waiting for the GPU. Pageable memory is staged at once; pinned memory must not change
    until the copy is done. A tensor that is there already stays as it is."""
    return (x if isinstance(x, Tensor) else torch.from_numpy(x)).to(device, non_blocking=True)


def as_float(x: Tensor) -> Tensor:
    """float32; uint8 is scaled to [0, 1]."""
    if x.dtype == torch.uint8:
        return x.float().mul_(1 / 255)
    return x if x.dtype == torch.float32 else x.float()


def rows_of(x: Tensor) -> Tensor:
    """[B, ...] -> [B, D]; of scalars [B], [B, 1]."""
    return x.reshape(x.shape[0], -1)


def each(obs: Any, function: Callable[..., Tensor], *more: Any) -> Any:
    """Applies a function to an observation, or to every value of a dict of them; `more` are its further arguments."""
    if not isinstance(obs, dict):
        return function(obs, *more)
    return {key: function(x, *(other[key] for other in more)) for key, x in obs.items()}


class Torso(nn.Module):
    """[B, ...] -> [B, features]. Made with `last=False` it has no last linear layer, whose size is `width`."""

    features: int
    width: int


class OneHot(nn.Module):
    """Choices [B, ..., *parts] as zeros and ones, [B, D]: `sizes` are how many choices each part has, `stack` rows at once.

    A number that is no choice counts as the nearest one.
    """

    first: Tensor  # of each part, the index of its first element
    most: Tensor

    def __init__(self, sizes: tuple[int, ...], stack: int = 1) -> None:
        super().__init__()
        self.size, self.stack = sum(sizes), stack
        self.register_buffer("first", torch.tensor([0, *sizes[:-1]]).cumsum(0), persistent=False)
        self.register_buffer("most", torch.tensor(sizes) - 1, persistent=False)

    @property
    def features(self) -> int:
        return self.stack * self.size

    def forward(self, x: Tensor) -> Tensor:
        index = x.reshape(len(x), self.stack, -1).long().clamp_min(0).minimum(self.most) + self.first
        out = torch.zeros(len(x), self.stack, self.size, device=x.device)
        return out.scatter_(2, index, 1.0).flatten(1)


class MLP(Torso):
    """Linear layers with ReLU between and after them: [B, ...] -> [B, hidden[-1]]. `norm` comes before the first.

    With `encode` the observations are choices.
    """

    def __init__(
        self,
        inputs: int,
        hidden: tuple[int, ...],
        last: bool = True,
        norm: Moderate | None = None,
        encode: OneHot | None = None,
    ) -> None:
        super().__init__()
        self.encode = encode
        self.norm = norm
        sizes = (inputs, *(hidden if last else hidden[:-1]))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.features, self.width = sizes[-1], hidden[-1] if hidden else 0

    def forward(self, x: Tensor) -> Tensor:
        x = rows_of(as_float(x)) if self.encode is None else self.encode(x)
        x = x if self.norm is None else self.norm(x)
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = F.relu(F.linear(x, layer.weight, layer.bias))  # calling a small layer as a module takes twice as long
        return x


class ConvNet(Torso):
    """Convolutions, then one linear layer if `last`, each followed by ReLU: [B, channels, H, W] -> [B, features].

    With `channels_last` the input is [B, ..., H, W, C], as cameras and renderers return it. History becomes channels.
    """

    linear: nn.Linear | None
    convolutions: ClassVar[dict[str, tuple[int, int, int]]]  # name -> channels, kernel size, stride
    in_bfloat16 = False  # compute in bfloat16; weights and features stay float32

    def __init__(self, image: Image, last: bool = True) -> None:
        super().__init__()
        self.image = image
        self.layers(image.channels)
        try:
            with torch.no_grad():
                flat = self.convolve(torch.zeros(1, image.channels, image.height, image.width)).flatten(1).shape[1]
        except RuntimeError:
            size = f"{image.height} x {image.width}"
            raise UserError(
                f"Images of {size} are too small for {type(self).__name__}; try convnet minatar or mlp."
            ) from None
        self.linear = nn.Linear(flat, self.width) if last else None
        self.features = self.width if last else flat

    def layers(self, channels: int) -> None:
        kind: type[nn.Conv2d] = FirstConv
        for name, (size, kernel, stride) in self.convolutions.items():
            self.add_module(name, kind(channels, size, kernel, stride))
            kind, channels = nn.Conv2d, size

    def convolve(self, x: Tensor) -> Tensor:
        for name in self.convolutions:
            x = F.relu(getattr(self, name)(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        image = self.image
        x = x.movedim(-1, -3).contiguous() if image.channels_last else x
        x = x.reshape(len(x), image.channels, image.height, image.width)
        if not self.in_bfloat16:
            return self._features(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            return self._features(x).float()

    def _features(self, x: Tensor) -> Tensor:
        x = self.convolve(x).flatten(1)
        return x if self.linear is None else F.relu(self.linear(x))


class NatureCNN(ConvNet):
    """Mnih et al. 2015."""

    width = 512
    convolutions: ClassVar = {"conv1": (32, 8, 4), "conv2": (64, 4, 2), "conv3": (64, 3, 1)}


class ImpalaCNN(ConvNet):
    """Espeholt et al. 2018, shallow (the network of Mnih et al. 2013, 2016)."""

    width = 256
    convolutions: ClassVar = {"conv1": (16, 8, 4), "conv2": (32, 4, 2)}


class MinAtarCNN(ConvNet):
    """Young and Tian 2019."""

    width = 128
    convolutions: ClassVar = {"conv": (16, 3, 1)}


class ImpalaResNet(ConvNet):
    """Espeholt et al. 2018, deep: three sections of 16, 32, 32 channels, linear 256.

    A section is conv 3x3, max pooling 3x3/2 and two residual blocks; ReLU follows the last.
    """

    width = 256

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


class FirstConv(nn.Conv2d):
    """The convolution over pixels: [B, C, H, W], floats or bytes.

    A GPU's matrix units are efficient with many channels, but images have few. Where the stride s divides the kernel and
    the image, squares of s x s pixels become channels there: the same sums, with a stride of 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return super().forward(as_float(x))
        if self.folds(x):
            return self.folded(x)
        return super().forward(as_float(x.contiguous(memory_format=torch.channels_last)))  # for cuDNN's fast kernels

    def folds(self, x: Tensor) -> bool:
        s = self.stride[0]
        return s > 1 and not any(n % s for n in (*self.kernel_size, *x.shape[2:])) and self.padding == (0, 0)

    def folded(self, x: Tensor) -> Tensor:
        s, weight = self.stride[0], self.weight
        if x.dtype == torch.uint8:  # whole numbers up to 255 are exact in bfloat16
            weight = weight * (1 / 255)
        x = _squares(x, s).permute(0, 2, 4, 1, 3, 5)  # [B, H / s, W / s, C, s, s]
        weight = _squares(weight, s).permute(0, 1, 3, 5, 2, 4).flatten(1, 3)  # [out, C s s, kernel / s, kernel / s]
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32
        x = torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)  # transposed and converted in one copy
        return F.conv2d(x.flatten(3).movedim(3, 1), weight, self.bias)


def _squares(x: Tensor, s: int) -> Tensor:
    """[N, C, H, W] -> [N, C, H / s, s, W / s, s]"""
    n, c, h, w = x.shape
    return x.view(n, c, h // s, s, w // s, s)


def use_bfloat16(net: nn.Module) -> None:
    for module in net.modules():
        if isinstance(module, ConvNet):
            module.in_bfloat16 = True


class Concat(Torso):
    """A torso for each key of a Dict observation; their features are concatenated."""

    def __init__(self, torsos: dict[str, Torso]) -> None:
        super().__init__()
        self.keys = list(torsos)
        self.torsos = nn.ModuleList(torsos.values())
        self.features = sum(torso.features for torso in torsos.values())
        self.width = sum(torso.width for torso in torsos.values())

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.cat([torso(x[key]) for key, torso in zip(self.keys, self.torsos, strict=True)], 1)


CONVNETS: dict[str, Callable[[Image, bool], Torso]] = {
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
    last: bool = True,
    normalize: bool = False,
    only_pictures: bool = False,
) -> Torso:
    """A convolutional network for images, an MLP for other observations, one torso for each key of a Dict.

    `auto`: uint8 or bool images of at least 36 x 36 get the convnet named by `large`, as those of floats with channels do;
    smaller ones with channels, as MinAtar's, get the MinAtar CNN. A named convnet applies to a single observation, and to
    the large images of a Dict. Without `last` the last linear layer of each torso is left to the heads. `normalize` is for
    vectors of floats. `only_pictures`: without those that get an MLP.
    """
    torsos: dict[str, Torso] = {}
    for name, column in env.observation.items():
        if only_pictures and not is_picture(env, name):
            continue
        key = name.removeprefix("obs/")
        stack = history if not stacked or key in stacked else 1
        if name in env.categories:
            encode = OneHot(env.categories[name], stack)
            torsos[key] = MLP(encode.features, hidden, last, encode=encode)
            continue
        image = image_of(*column)
        kind = _kind(image, column)
        if convnet != "auto" and (name == "obs" or kind == "large"):
            kind = convnet
        elif kind == "large":
            kind = large
        if kind == "mlp":
            norm = Moderate(*_bounds(env, name, stack)) if normalize and column.dtype.kind == "f" else None
            torsos[key] = MLP(stack * int(np.prod(column.shape)), hidden, last, norm)
        elif image is None:
            raise UserError(f"convnet {kind} needs an image, but {env.name} has the observation {list(column.shape)}.")
        else:
            torsos[key] = CONVNETS[kind](image._replace(channels=stack * image.channels), last)
    return torsos["obs"] if "obs" in env.observation else Concat(torsos)


def _bounds(env: EnvSpec, name: str, stack: int) -> list[Array]:
    """The declared range of each element of a stacked vector; infinite where it is not known."""
    column, size = None if env.adapter is None else env.adapter.columns[name], int(np.prod(env.observation[name].shape))
    if column is None:
        low, high = np.float64(-np.inf), np.float64(np.inf)
    else:
        box: Any = column.space
        low, high = box.low, box.high
        if column.shrink is not None:  # each element is a mean of many
            low, high = low.min(), high.max()
    return [np.tile(np.broadcast_to(end.ravel(), size), stack) for end in (low, high)]


def is_picture(env: EnvSpec, name: str) -> bool:
    """Whether a column is an image that a convolutional network takes."""
    column = env.observation[name]
    return name not in env.categories and _kind(image_of(*column), column) != "mlp"


def _kind(image: Image | None, column: ArraySpec) -> str:
    """ "large", "minatar" or "mlp"."""
    if image is None:
        return "mlp"
    certain = image.height == image.width or image.channels <= CHANNELS or column.dtype == np.bool_
    if column.dtype not in (np.uint8, np.bool_):  # floats whose range nobody knows; a table has two axes
        return "large" if image.side >= LARGE and certain and len(column.shape) == 3 else "mlp"
    if image.side >= LARGE:
        return "large"
    return "minatar" if len(column.shape) == 3 and image.side >= 5 and certain else "mlp"


def user_network(name: str, env: EnvSpec, history: int, stacked: tuple[str, ...]) -> tuple[nn.Module, int]:
    """The network below the heads that `module:callable` makes, and the width of its features."""
    make = callables.find(name)
    if make is None:
        raise UserError(f"There is no callable {name!r} that makes a network.")
    try:
        net: nn.Module = make(env)
        net.register_forward_pre_hook(_contiguous)
        with torch.no_grad():
            out: Tensor = net(observation(blank_rows(env, history), history - 1, history, stacked))
        single = all(parameter.dtype == torch.float32 for parameter in net.parameters())
    except Exception as error:
        raise UserError(f"The network of {name} cannot be made or run: {type(error).__name__}: {error}") from error
    if not single:
        raise UserError(f"The network of {name} must have float32 parameters.")
    if out.ndim != 2 or len(out) != 2:
        maps = f"must map [B, ...] observations to [B, features]; for B = 2 it gave {list(out.shape)}."
        raise UserError(f"The network of {name} {maps}")
    return net, out.shape[1]


def blank_rows(env: EnvSpec, history: int) -> dict[str, Tensor]:
    """Rows [2, history, ...] of zeros."""
    return {name: torch.from_numpy(x) for name, x in zeros(env.step, 2, history).items()}


def _contiguous(net: nn.Module, args: tuple[Any]) -> Any:
    """Users' networks may call `view`, which needs contiguous tensors."""
    return (each(args[0], Tensor.contiguous),)
