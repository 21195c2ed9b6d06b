"""Adapter: between the spaces of an environment and the columns that are recorded. It needs the spaces alone.

columns = adapter.observation(obs)     # an observation of the environment, or a batch of them, as arrays by column
action = adapter.action(recorded)      # a recorded action, or a batch of them, as the environment takes it
recorded = adapter.recorded(action)    # and back

Each part of a Dict or Tuple is one column: `obs/key`, and `obs/key.part` where they are nested.

    Box             as it is; floats are float16 or float32, integers have a sign (but uint8)
    Box, an image   from 0 to 1, or of integers from 0: uint8. Resized and made grey where that is asked for
    Discrete        an integer from 0, which the network makes one-hot; MultiDiscrete: one for each part
    MultiBinary     booleans
    Text            dropped

Where actions are masked (`records.masks`), the column `action_mask` says which are legal; a network does not see it.

Actions that are choices become one Discrete or MultiDiscrete that starts at 0, all others one Box.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from veldt.errors import UserError
from veldt.records.images import CHANNELS, LARGE, Image, Shrink, image_of
from veldt.records.masks import MASK, Masks
from veldt.records.tree import Array, ArraySpec, Tree, spec

MOST_COMBINED = 256  # combinations of choices that become one choice, for algorithms that take no more
MOST_CHOICES = 2**14  # in one column or action, in all
MOST_ACTIONS = 2**20  # of a single choice, which may be from a table
HUGE = 128  # pixels of a side beyond which a smaller image is recommended
SMALLEST_IMAGE = 5  # pixels of a side

Space = spaces.Space[Any]
Path = tuple[Any, ...]


class Column:
    """One part of an observation, as it is read from the environment and as it is recorded."""

    def __init__(self, path: Path, space: Space, image_size: int, grayscale: bool) -> None:
        self.path, self.space = path, space
        self.sizes: tuple[int, ...] = ()  # of the choices of Discrete and MultiDiscrete
        self.start: Any = 0
        self.raw: np.dtype[Any] = np.dtype(np.int64)
        self.scale, self.shrink = 0.0, None  # of what becomes uint8; of an image that is made smaller
        shape = self.shape = space.shape or ()  # as it is read
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            sizes, start = _choices(space)
            self.sizes, self.start = tuple(sizes.ravel().tolist()), start
            self.spec = spec(shape, np.int16 if sizes.max() < 2**15 else np.int32)
            return
        self.raw = np.dtype(np.bool_) if isinstance(space, spaces.MultiBinary) else _plain(space.dtype)
        self.spec = spec(shape, self.raw)
        if not isinstance(space, spaces.Box) or (image := _image(space)) is None:
            return
        self.image = image
        self.scale = _scale(space, image)
        if image.side >= LARGE and (image_size or grayscale):
            self.shrink = Shrink(shape, image, image_size, grayscale)
            shape = self.shrink.shape
        self.spec = spec(shape, np.uint8 if self.scale else self.raw)

    image: Image | None = None

    def read(self, obs: Any) -> Array:
        """The part of an observation, or of a batch of them."""
        for key in self.path:
            obs = obs[key]
        x: Array = np.asarray(obs, self.raw)
        return x - self.start if self.sizes else x

    def clipped(self, x: Array) -> Array:
        """What was read, within the bounds of a Box."""
        return np.clip(x, self.space.low, self.space.high).astype(x.dtype) if isinstance(self.space, spaces.Box) else x

    def encode(self, x: Array) -> Array:
        """What was read, as it is recorded."""
        if self.sizes:
            return x.astype(self.spec.dtype)
        if self.shrink is not None:
            x = self.shrink(x)
        if self.scale:
            with np.errstate(invalid="ignore"):  # what is not finite is dropped
                return np.rint(x * np.float32(self.scale)).clip(0, 255).astype(np.uint8)
        if x.dtype != self.spec.dtype:
            return np.rint(x).astype(self.spec.dtype) if self.spec.dtype.kind in "iu" else x.astype(self.spec.dtype)
        return x


class Adapter:
    """`combine`: the algorithm takes a single choice, so a few combinations of choices become one. `masks`: where the
    environment says which actions are legal, info or observation (its key `action_mask`); empty: it does not."""

    def __init__(
        self,
        observation: Space,
        action: Space,
        name: str,
        image_size: int = 0,
        grayscale: bool = False,
        combine: bool = False,
        masks: str = "",
    ) -> None:
        self.observation_space, self.taken = observation, action
        self.settings: dict[str, Any] = {"image_size": image_size, "grayscale": grayscale}
        self.settings |= {"combine": combine, "masks": masks}
        self.notices: list[str] = []  # what a user should know
        self.columns: dict[str, Column] = {}
        for path, leaf in _leaves(observation, name, "observation"):
            if not (masks == "observation" and path[0] == MASK):
                self._add(path, leaf, name, image_size, grayscale)
        if not self.columns:
            raise UserError(f"{name} has no observations that a network can take: its space is {_short(observation)}.")
        images = [x for x in self.columns.values() if x.image is not None and x.image.side >= LARGE]
        if (image_size or grayscale) and not images:
            raise UserError(f"image_size and grayscale are for images of at least {LARGE} x {LARGE}; {name} has none.")
        self._parts = list(_leaves(action, name, "action"))
        self._combined: Array | None = None
        self.action_space = self._action_space(name, combine)
        self.masks = self._masks(name) if masks else None
        whole = isinstance(action, spaces.Box | spaces.Discrete | spaces.MultiDiscrete) and self.action_space is action
        self._simple = action if whole else None
        start = getattr(action, "start", 0) if whole else 0
        self._start = np.asarray(start, np.int64) if np.any(start) else None

    @property
    def action_column(self) -> ArraySpec:
        space = self.action_space
        return spec(space.shape or (), np.float32 if isinstance(space, spaces.Box) else np.int64)

    @property
    def categories(self) -> dict[str, tuple[int, ...]]:
        return {name: column.sizes for name, column in self.columns.items() if column.sizes}

    def legal(self, obs: Any, info: Any, *leading: int) -> Array:
        """The action masks of an observation and its info, or of a batch of them, as rows [*leading, size]."""
        assert self.masks is not None
        return self.masks.read(obs[MASK] if self.settings["masks"] == "observation" else info[MASK], *leading)

    def observation(self, obs: Any, clip: bool = False) -> Tree:
        """`clip`: what is outside its space is clipped. A number that is no choice is a ValueError."""
        read = {name: column.read(obs) for name, column in self.columns.items()}
        for name, sizes in self.categories.items():
            x, column = read[name], self.columns[name]
            if (x < 0).any() or (x >= np.reshape(sizes, column.shape)).any():
                raise ValueError(f"{name} is none of the choices of {column.space}")
        return {name: self.columns[name].encode(self.columns[name].clipped(x) if clip else x) for name, x in read.items()}

    def action(self, action: Array) -> Any:
        space = self._simple
        if isinstance(space, spaces.Box):
            return np.asarray(np.clip(action, space.low, space.high), space.dtype)
        if space is not None:
            return action if self._start is None else action + self._start
        leading = action.shape[: action.ndim - len(self.action_space.shape or ())]
        flat = action.reshape(*leading, -1)
        if self._combined is not None:
            flat = np.stack(np.unravel_index(action, self._combined), -1)
        parts, at = [], 0
        for path, leaf in self._parts:
            size = math.prod(leaf.shape or ())
            x = flat[..., at : at + size].reshape((*leading, *(leaf.shape or ())))
            at += size
            if isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f":
                x = np.clip(x, leaf.low, leaf.high)
            else:
                x = x + _choices(leaf)[1]
            x = x.astype(leaf.dtype)
            parts.append((path, np.asarray(x) if isinstance(leaf, spaces.Box) else x))  # a Box has no scalars
        return _structure(self.taken, iter(parts))

    def recorded(self, action: Any, *leading: int) -> Array:
        """An action that the environment takes, or a batch [*leading] of them, as it is recorded. What cannot be one is a
        TypeError, ValueError, IndexError or KeyError."""
        parts = []
        for path, leaf in self._parts:
            x = action
            for key in path:
                x = x[key]
            x = np.reshape(x, (*leading, math.prod(leaf.shape or ())))
            if not (isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f"):
                if x.dtype.kind not in "biu":
                    raise TypeError(f"a choice is an integer, not {x.dtype}")
                x = x.astype(np.int64) - _choices(leaf)[1].ravel()
            parts.append(x)
        whole, column = np.concatenate(parts, -1), self.action_column
        if self._combined is not None:
            whole = np.ravel_multi_index(tuple(np.moveaxis(whole, -1, 0)), tuple(self._combined))
        return np.asarray(whole, column.dtype).reshape((*leading, *column.shape))

    def _add(self, path: Path, leaf: Space, name: str, image_size: int, grayscale: bool) -> None:
        column = ".".join(map(str, path))
        if _is_text(leaf):
            self.notices.append(f"the observation {column or 'of text'} is dropped: a network cannot take text")
            return
        if 0 in (leaf.shape or ()):
            self.notices.append(f"the observation {column} is dropped: it is empty")
            return
        key = f"obs/{column}" if path else "obs"
        if key in self.columns:
            raise UserError(f"{name} has two observations whose name would be {column!r}; rename one of them.")
        if isinstance(leaf, spaces.Discrete | spaces.MultiDiscrete):
            choices = int(np.sum(_choices(leaf)[0], dtype=np.float64))
            if choices > MOST_CHOICES:
                raise UserError(
                    f"{name} has the observation {_short(leaf)}; one-hot it would have {choices:,} elements, more than "
                    f"{MOST_CHOICES:,}: describe it by a Box in a wrapper (gymnasium.ObservationWrapper)."
                )
        self.columns[key] = made = Column(path, leaf, image_size, grayscale)
        shown = f"images of {made.image.height} x {made.image.width}" if made.image else ""
        if made.scale and (made.raw.kind == "f" or made.scale < 1):
            self.notices.append(f"{key}: {shown} in {leaf.dtype} are kept as bytes (256 levels)")
        if made.image and not made.shrink and max(made.image.height, made.image.width) > HUGE:
            less = f"--image-size 84 --grayscale makes them {made.spec.nbytes / 84**2:.0f} times smaller"
            self.notices.append(f"{key}: {shown} are large for a replay store and a network; {less}")

    def _action_space(self, name: str, combine: bool) -> Space:
        whole, leaves = self.taken, [leaf for _, leaf in self._parts]
        if not sum(math.prod(leaf.shape or ()) for leaf in leaves):
            raise UserError(f"{name} has no actions: its action space is {_short(whole)}.")
        discrete = [not (isinstance(leaf, spaces.Box) and leaf.dtype.kind == "f") for leaf in leaves]
        if not any(discrete):
            if whole is leaves[0]:
                return whole
            low, high = (np.concatenate([np.ravel(getattr(x, end)) for x in leaves]) for end in ("low", "high"))
            return spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        if not all(discrete):
            raise UserError(
                f"{name} has both discrete and continuous actions, {_short(whole)}; Veldt's algorithms take one kind: fix "
                "or discretise the others in a wrapper (gymnasium.ActionWrapper)."
            )
        if isinstance(whole, spaces.Discrete):
            if whole.n > MOST_ACTIONS:
                raise UserError(f"{name} has {whole.n:,} actions; offer at most {MOST_ACTIONS:,} in a wrapper.")
            return whole
        for leaf in leaves:
            self._check_choices(leaf, name)
        nvec = np.concatenate([np.ravel(_choices(leaf)[0]) for leaf in leaves]).astype(np.int64)
        combinations = math.prod(nvec.tolist())
        if combine and combinations <= MOST_COMBINED:
            self._combined = nvec
            self.notices.append(f"its actions, {_short(whole)}, are one choice of {combinations} combinations")
            return spaces.Discrete(combinations)
        return whole if isinstance(whole, spaces.MultiDiscrete) else spaces.MultiDiscrete(nvec)

    def _masks(self, name: str) -> Masks:
        if isinstance(self.action_space, spaces.Box):
            raise UserError(
                f"{name} has action masks, but its actions are continuous, {_short(self.taken)}; --no-action-masks takes "
                "action_mask as an observation, or ignores it in info."
            )
        sizes = np.concatenate([np.ravel(_choices(leaf)[0]) for _, leaf in self._parts]).astype(np.int64)
        self.notices.append("actions are masked: illegal ones are neither taken nor bootstrapped from")
        masks = Masks([path for path, _ in self._parts], sizes, self._combined is not None)
        if isinstance(self.observation_space, spaces.Dict) and self.settings["masks"] == "observation":
            try:
                masks.read(self.observation_space[MASK].sample())
            except ValueError as error:
                raise UserError(f"{name} has an observation action_mask that does not fit its actions: {error}.") from None
        return masks

    def _check_choices(self, leaf: Space, name: str) -> None:
        if isinstance(leaf, spaces.Box) and not (leaf.is_bounded("both") and leaf.high.size):
            raise UserError(f"{name} has actions of integers without bounds, {_short(leaf)}; bound them in a wrapper.")
        if np.sum(_choices(leaf)[0], dtype=np.float64) > MOST_CHOICES:
            raise UserError(
                f"{name} has actions of integers in a wide range, {_short(leaf)}: over {MOST_CHOICES:,} choices; "
                "offer fewer in a wrapper (gymnasium.ActionWrapper), or floats, for apex-dpg and impala."
            )


def _leaves(space: Space, name: str, what: str, path: Path = ()) -> Iterator[tuple[Path, Space]]:
    """The parts of a space that are no Dict or Tuple, and where in a value they are."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts: Any = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in parts:
            yield from _leaves(part, name, what, (*path, key))
        return
    known: Any = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    if not (isinstance(space, known) or (what == "observation" and _is_text(space))):
        where = f" ({'.'.join(map(str, path))})" if path else ""
        raise UserError(
            f"{name} has the {what} space {_short(space)}{where}; Veldt takes Box, Discrete, MultiDiscrete, MultiBinary, "
            f"and Dicts and Tuples of them: write a wrapper that makes one of them of it (gymnasium.{what.title()}Wrapper)."
        )
    yield path, space


def _is_text(space: Space) -> bool:
    """Text, and spaces of other packages whose values are texts, such as MiniGrid's missions."""
    return space.dtype is not None and np.dtype(space.dtype).kind in "US"


def _structure(space: Space, parts: Iterator[tuple[Path, Array]]) -> Any:
    """Parts, in the order of `_leaves`, as a value of the space."""
    if isinstance(space, spaces.Dict):
        return {key: _structure(part, parts) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_structure(part, parts) for part in space.spaces)
    return next(parts)[1]


def _choices(space: Space) -> tuple[Array, Array]:
    """How many choices each element has, and the first of them."""
    if isinstance(space, spaces.Discrete):
        return np.asarray(int(space.n)), np.asarray(int(space.start), np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return np.asarray(space.nvec, np.int64), np.asarray(space.start, np.int64)
    if isinstance(space, spaces.MultiBinary):
        return np.full(space.shape, 2, np.int64), np.zeros(space.shape, np.int64)
    assert isinstance(space, spaces.Box), space
    with np.errstate(over="ignore"):
        return np.asarray(space.high.astype(np.float64) - space.low + 1), space.low.astype(np.int64)


def _plain(dtype: Any) -> np.dtype[Any]:
    """What a column of this dtype is recorded as: a dtype that torch computes with."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return dtype if dtype.itemsize <= 4 else np.dtype(np.float32)
    unsigned: dict[Any, Any] = {
        np.dtype(np.uint16): np.int32,
        np.dtype(np.uint32): np.int64,
        np.dtype(np.uint64): np.float32,
    }
    found: np.dtype[Any] = np.dtype(unsigned.get(dtype, dtype))
    return found


def _image(box: spaces.Box) -> Image | None:
    """What the sides show to be an image; of floats and wide integers only where the range agrees."""
    image = image_of(box.shape, box.dtype)
    if image is None or image.side < (SMALLEST_IMAGE if len(box.shape) == 3 else LARGE):
        return None
    if not (image.height == image.width or image.channels <= CHANNELS):
        return None
    large = image.side >= LARGE and len(box.shape) == 3
    return image if large or box.dtype == np.uint8 or _scale(box, image) else None


def _scale(box: spaces.Box, image: Image) -> float:
    """What makes bytes of an image's numbers; 0: they stay as they are."""
    if box.dtype in (np.uint8, np.bool_) or not box.is_bounded("both"):
        return 0.0
    if box.dtype.kind in "iu" and image.side < LARGE:
        return 0.0
    low, high = (float(x) for x in (box.low.min(), box.high.max()))
    even = low == 0 == box.low.max() and box.high.min() == high > 0
    return 255 / high if even and (box.dtype.kind in "iu" or high in (1.0, 255.0)) else 0.0


def _short(space: Space) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 200 else f"{text[:200]}..."
