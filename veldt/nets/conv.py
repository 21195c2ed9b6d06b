"""Convolutional torsos: images -> features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veldt.errors import UserError
from veldt.nets.tensors import as_float


class Image(NamedTuple):
    """The input of a convolutional network."""

    channels: int
    height: int
    width: int
    channels_last: bool = False


class ConvNet(nn.Module, ABC):
    """Convolutions, then one linear layer, each followed by ReLU: [B, channels, H, W] -> [B, features].

    With `channels_last` the input is [B, ..., H, W, C], as cameras and renderers return it. History becomes channels.
    """

    in_bfloat16 = False  # compute in bfloat16; weights and features stay float32

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
    """Espeholt et al. 2018, shallow (the network of Mnih et al. 2013, 2016): conv 16 8x8/4, 32 4x4/2, linear 256."""

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
    """Espeholt et al. 2018, deep: three sections of 16, 32, 32 channels, linear 256.

    A section is conv 3x3, max pooling 3x3/2 and two residual blocks; ReLU follows the last.
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


def use_bfloat16(net: nn.Module) -> None:
    """All convolutional torsos of the network compute in bfloat16 from now on."""
    for module in net.modules():
        if isinstance(module, ConvNet):
            module.in_bfloat16 = True


def _squares(x: Tensor, s: int) -> Tensor:
    """[N, C, H, W] -> [N, C, H / s, s, W / s, s]"""
    n, c, h, w = x.shape
    return x.view(n, c, h // s, s, w // s, s)
