"""Which torso an environment's observations get, and networks made by a user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from veldt import callables
from veldt.errors import UserError
from veldt.nets.conv import Image, ImpalaCNN, ImpalaResNet, MinAtarCNN, NatureCNN
from veldt.nets.heads import MLP
from veldt.records.step import EnvSpec
from veldt.records.tree import ArraySpec

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
    """A convolutional network for images, an MLP for other observations, one torso for each key of a Dict.

    `auto`: uint8 or bool images of at least 36 x 36 get the convnet named by `large`; smaller ones with channels, as
    MinAtar's, get the MinAtar CNN. A named convnet applies to a single observation, and to the large images of a Dict.
    """
    torsos: dict[str, nn.Module] = {}
    for name, column in env.observation.items():
        key = name.removeprefix("obs/")
        stack = history if not stacked or key in stacked else 1
        image = _image(column)
        kind = _kind(image, column)
        if convnet != "auto" and (name == "obs" or kind == "large"):
            kind = convnet
        elif kind == "large":
            kind = large
        if kind == "mlp":
            torsos[key] = MLP(stack * int(np.prod(column.shape)), hidden)
        elif image is None:
            raise UserError(f"convnet {kind} needs an image, but {env.name} has the observation {list(column.shape)}.")
        else:
            torsos[key] = CONVNETS[kind](image._replace(channels=stack * image.channels))
    return torsos["obs"] if "obs" in env.observation else Concat(torsos)


class Concat(nn.Module):
    """A torso for each key of a Dict observation; their features are concatenated."""

    def __init__(self, torsos: dict[str, nn.Module]) -> None:
        super().__init__()
        self.keys = list(torsos)
        self.torsos = nn.ModuleList(torsos.values())
        self.features = sum(features_of(torso) for torso in torsos.values())

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        return torch.cat([torso(x[key]) for key, torso in zip(self.keys, self.torsos, strict=True)], 1)


def user_torso(name: str, env: EnvSpec, observe: Callable[[dict[str, Tensor]], Any], history: int) -> tuple[nn.Module, int]:
    """The torso that `module:callable` makes, and the number of its features."""
    torso, out = user_network(name, env, observe, history)
    if out.ndim != 2 or len(out) != 2:
        raise UserError(
            f"The network of {name} must map [B, ...] observations to [B, features]; for B = 2 it gave {list(out.shape)}."
        )
    return torso, out.shape[1]


def features_of(torso: nn.Module) -> int:
    """The width of a torso's output."""
    assert isinstance(torso.features, int), torso
    return torso.features


def user_network(
    name: str, env: EnvSpec, observe: Callable[[dict[str, Tensor]], Any], history: int
) -> tuple[nn.Module, Tensor]:
    """The network that `module:callable` makes, and its output for two blank observations, which `observe` stacks."""
    make = callables.find(name)
    if make is None:
        raise UserError(f"There is no callable {name!r} to make a network with.")
    blank = {key: torch.from_numpy(np.zeros((2, history, *c.shape), c.dtype)) for key, c in env.step.items()}
    try:
        net: nn.Module = make(env)
        with torch.no_grad():
            out: Tensor = net(observe(blank))
        single = all(parameter.dtype == torch.float32 for parameter in net.parameters())
    except Exception as error:
        raise UserError(f"The network of {name} cannot be made or run: {type(error).__name__}: {error}") from error
    if not single:
        raise UserError(f"The network of {name} must have float32 parameters.")
    return net, out


def _image(column: ArraySpec) -> Image | None:
    """A column [H, W], [C, H, W] or [H, W, C]: equal sides are height and width; otherwise at most 4 are channels."""
    shape = column.shape
    if len(shape) not in (2, 3) or 0 in shape:
        return None
    if len(shape) == 2:
        return Image(1, *shape)
    squares = (shape[0] == shape[1], shape[1] == shape[2])
    channels_last = squares[0] if squares[0] != squares[1] else shape[2] <= 4 or column.dtype == np.bool_
    height, width = shape[:2] if channels_last else shape[1:]
    return Image(shape[2] if channels_last else shape[0], height, width, channels_last)


def _kind(image: Image | None, column: ArraySpec) -> str:
    """ "large", "minatar" or "mlp"."""
    if image is None or column.dtype not in (np.uint8, np.bool_):
        return "mlp"
    side = min(image.height, image.width)
    if side >= 36:
        return "large"
    certain = image.height == image.width or image.channels <= 4 or column.dtype == np.bool_
    return "minatar" if len(column.shape) == 3 and side >= 5 and certain else "mlp"
