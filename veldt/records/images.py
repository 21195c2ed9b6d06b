"""Which observations are images, and images made smaller: resized by averaging areas, and in shades of grey."""

from typing import NamedTuple

import numpy as np

from veldt.records.tree import Array

LARGE = 36  # pixels of the shorter side from which an image is large: enough for the convolutional networks of Atari
CHANNELS = 4  # at most, where the sides of an image do not say which axis is which
GREY = np.array([0.299, 0.587, 0.114], np.float32)


class Image(NamedTuple):
    channels: int
    height: int
    width: int
    channels_last: bool = False

    @property
    def side(self) -> int:
        return min(self.height, self.width)


def image_of(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Image | None:
    """A column [H, W], [C, H, W] or [H, W, C]: equal sides are height and width; otherwise at most 4 are channels."""
    if len(shape) not in (2, 3) or 0 in shape:
        return None
    if len(shape) == 2:
        return Image(1, *shape)
    squares = (shape[0] == shape[1], shape[1] == shape[2])
    channels_last = squares[0] if squares[0] != squares[1] else shape[2] <= CHANNELS or dtype == np.bool_
    height, width = shape[:2] if channels_last else shape[1:]
    return Image(shape[2] if channels_last else shape[0], height, width, channels_last)


class Shrink:
    """Images [..., H, W], [..., C, H, W] or [..., H, W, C] -> [..., h, w] if grey or without channels, else [..., h, w, C].

    `size` is the new height and width; 0: they stay.
    """

    def __init__(self, shape: tuple[int, ...], image: Image, size: int, grey: bool) -> None:
        self.first, self.flat = len(shape) == 3 and not image.channels_last, len(shape) == 2
        self.grey = grey and image.channels in (3, 4)  # the fourth is opacity
        self.drop = self.flat or self.grey or (grey and image.channels == 1)
        self.rows, self.columns = (_areas(n, size) if size else None for n in (image.height, image.width))
        height, width = (size, size) if size else (image.height, image.width)
        self.shape = (height, width) if self.drop else (height, width, image.channels)

    def __call__(self, x: Array) -> Array:
        """Floats."""
        x = np.asarray(x, np.float32)
        x = np.moveaxis(x, -3, -1) if self.first else x[..., None] if self.flat else x
        x = (x[..., :3] @ GREY)[..., None] if self.grey else x
        if self.rows is not None and self.columns is not None:
            wide = self.rows @ x.reshape(*x.shape[:-2], -1)  # [..., h, W C]
            x = self.columns @ wide.reshape(*wide.shape[:-1], *x.shape[-2:])
        return x[..., 0] if self.drop else x


def _areas(n: int, size: int) -> Array:
    """[size, n]: how much of each of n pixels lies in each of `size` equal parts; rows sum to 1."""
    edges = np.arange(size + 1) * (n / size)
    pixels = np.arange(n)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(overlap.clip(0) * (size / n), np.float32)
