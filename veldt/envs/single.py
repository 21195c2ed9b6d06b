"""Single: one environment of a vector, checked when it first resets and steps: what is wrong is said in one sentence.

A vector of such environments gets no more of their `info` than Veldt reads: an info may hold anything, and what changes its
type from one step to the next cannot be put in one array.
"""

import itertools
import re
import traceback
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from veldt.envs.vector import RETURN_ENDS
from veldt.errors import UserError
from veldt.records.masks import MASK, Masks


class Single(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, name: str) -> None:
        check_kind(env, name)
        super().__init__(env)
        self.name = name
        self._reset = self._stepped = False  # and what came was checked
        self._scalar = _has_scalar(env.action_space)
        self.masks: Masks | None = None  # set where info says which actions are legal

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._reset:
            obs, info = self.env.reset(seed=seed, options=options)
            return obs, self.read(info)
        try:
            found: Any = self.env.reset(seed=seed, options=options)
        except TypeError as error:
            word = next((word for word in ("seed", "options") if repr(word) in str(error)), "")
            if "unexpected keyword" not in str(error) or not word:
                raise
            needs = "reset(self, *, seed=None, options=None)"
            raise UserError(f"{self.name}: reset does not take {word}; Gymnasium's environments have {needs}.") from error
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            old = " as old Gym's environments do" if not isinstance(found, tuple) else ""
            raise UserError(f"{self.name}: reset must return a tuple (obs, info), but it returned {_kind(found)}{old}.")
        self._check(found[0], "reset")
        self._reset = True
        return found[0], self.read(found[1])

    def step(self, action: Any) -> Any:
        if self._scalar:  # of a vector's actions these alone are no arrays
            action = _with_arrays(self.env.action_space, action)
        if self._stepped:
            found: Any = self.env.step(action)
        else:
            try:
                found = self.env.step(action)
            except ValueError as error:
                if "expected 5, got 4" not in str(error):  # Gymnasium's own wrappers unpack what old environments return
                    raise
                found = [None] * 4
            self._check_step(found)
            self._stepped = True
        obs, reward, terminated, truncated, info = found
        return obs, reward, terminated, truncated, self.read(info)

    def find_mask(self) -> Any:
        """The action mask in the info of a first reset; None: it has none, or cannot be reset, which is said later."""
        try:
            found: Any = self.env.reset(seed=0)
        except UserError:
            raise
        except Exception:
            return None
        return found[1].get(MASK) if isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict) else None

    def read(self, info: dict[str, Any]) -> dict[str, Any]:
        """What Veldt reads of an info. An action mask that is missing masks nothing."""
        read = {RETURN_ENDS: info[RETURN_ENDS]} if RETURN_ENDS in info else {}
        if self.masks is None:
            return read
        try:
            mask = info.get(MASK)
            return read | {MASK: np.ones(self.masks.size, np.bool_) if mask is None else self.masks.read(mask)}
        except ValueError as error:
            raise UserError(f"{self.name}: info['action_mask'] does not fit its actions: {error}.") from None

    def _check_step(self, found: Any) -> None:
        n = len(found) if isinstance(found, tuple | list) else 0
        if n != 5:
            old = ", as old Gym's environments do; split done into terminated and truncated" if n == 4 else ""
            what = f"{n} values" if n else _kind(found)
            raise UserError(f"{self.name}: step must return obs, reward, terminated, truncated, info, not {what}{old}.")
        obs, reward, terminated, truncated, info = found
        self._check(obs, "step")
        if not _is_number(reward):
            raise UserError(
                f"{self.name}: step must return one number as the reward, not {_kind(reward)}; sum several in a wrapper."
            )
        for what, flag in (("terminated", terminated), ("truncated", truncated)):
            if not _is_number(flag):
                raise UserError(f"{self.name}: step must return a bool for {what}, not {_kind(flag)}.")
        if not isinstance(info, dict):
            raise UserError(f"{self.name}: step must return a dict for info, not {_kind(info)}.")

    def _check(self, obs: Any, where: str) -> None:
        if why := mismatch(self.env.observation_space, obs):
            raise UserError(f"{self.name}: an observation of {where} does not fit its space: {why}.")


def mismatch(space: spaces.Space[Any], x: Any, where: str = "") -> str:
    """Why an observation cannot be one of the space; values out of bounds are another matter."""
    at = f"{where}: " if where else ""
    if isinstance(space, spaces.Dict):
        if not isinstance(x, dict):
            return f"{at}the space is a Dict, got {_kind(x)}"
        if missing := [str(key) for key in space.spaces if key not in x]:
            return f"{at}it has no {missing[0]!r}"
        parts = ((space[key], x[key], f"{where}.{key}" if where else str(key)) for key in space.spaces)
        return next((why for part in parts if (why := mismatch(*part))), "")
    if isinstance(space, spaces.Tuple):
        if not isinstance(x, tuple | list) or len(x) != len(space.spaces):
            return f"{at}the space is a Tuple of {len(space.spaces)}, got {_kind(x)}"
        named = (f"{where}.{i}" if where else str(i) for i in itertools.count())
        return next((why for part in zip(space.spaces, x, named, strict=False) if (why := mismatch(*part))), "")
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return ""
    try:
        array = np.asarray(x)
    except Exception:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        return f"{at}the space is of numbers, got {_kind(x)}"
    if array.shape != space.shape:
        return f"{at}space {space.shape}, got {array.shape}"
    if space.dtype is not None and not np.can_cast(array.dtype, space.dtype, "same_kind"):
        return f"{at}space of {space.dtype}, got {array.dtype}"
    return ""


def _has_scalar(space: spaces.Space[Any]) -> bool:
    """Whether it is a Box without an axis, or has one."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return any(map(_has_scalar, space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces))
    return isinstance(space, spaces.Box) and space.shape == ()


def _with_arrays(space: spaces.Space[Any], x: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _with_arrays(part, x[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_with_arrays(part, each) for part, each in zip(space.spaces, x, strict=True))
    return np.asarray(x) if isinstance(space, spaces.Box) else x


def check_kind(env: Any, name: str) -> None:
    """Raises a UserError that says what this is, if it is no Gymnasium environment."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(env).__mro__]
    packages = {kind.partition(".")[0] for kind in kinds}
    what = ""
    if "envpool" in packages:
        what = "a vector of EnvPool; Veldt makes its own vectors: give it the single environment, such as its Gymnasium id"
    elif isinstance(env, VectorEnv) or any(kind.endswith(".VectorEnv") for kind in kinds):
        what = "a vector environment; give a function that makes a single one, --envs-per-actor says how many there are"
    elif isinstance(env, gym.Env):
        spaces_given = [getattr(env, f"{what}_space", None) for what in ("observation", "action")]
        if all(isinstance(space, spaces.Space) for space in spaces_given):
            return
        what = "without spaces: set observation_space and action_space to spaces of gymnasium.spaces"
    elif "pettingzoo" in packages:
        what = "a PettingZoo environment of several agents; Veldt trains one agent: control the others in a gymnasium.Env"
    elif "gym" in packages or "gym3" in packages:
        what = (
            "an environment of the old Gym package; make it a Gymnasium one with shimmy (GymV21CompatibilityV0, GymV26...)"
        )
    elif "dm_env" in packages or "dm_control" in packages:
        what = "a dm_env environment; make it a Gymnasium one with shimmy.DmControlCompatibilityV0"
    else:
        what = f"{_kind(env)}, not a gymnasium.Env; derive its class from gymnasium.Env"
    raise UserError(f"{name} is {what}.")


def not_made(name: str, error: Exception) -> tuple[UserError, str]:
    """What to say of an exception that an environment's constructor raised, and its traceback from there."""
    frames = traceback.extract_tb(error.__traceback__)
    here = Path(__file__).parent
    own = [x for x in frames if Path(x.filename).parent != here and "gymnasium" not in Path(x.filename).parts]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    text = " ".join(str(error).split())
    shown = f"{type(error).__name__}: {text}" if text else type(error).__name__
    told = "".join(traceback.format_list(own or list(frames)))
    advice = _advice(error, text)
    return UserError(f"{name} could not be made: {shown}{place}{advice}."), f"{told}{shown}"


def _advice(error: Exception, text: str) -> str:
    """What to do, where that is known."""
    if isinstance(error, TypeError) and (missing := re.search(r"missing \d+ required [\w-]+ arguments?: (['\w, ]+)", text)):
        words = " ".join(f"{word}=..." for word in re.findall(r"'(\w+)'", missing[1]))
        return f"; give it what is missing: --env-kwargs {words}"
    if "OpenGL" in text:
        return "; without a screen, set the environment variable MUJOCO_GL to egl or osmesa"
    return ""


def _is_number(x: Any) -> bool:
    """Also an array with one element, which becomes a number."""
    try:
        array = np.asarray(x)
    except Exception:
        return False
    return array.dtype.kind in "biuf" and array.size == 1 and array.ndim == 0


def _kind(x: Any) -> str:
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    if isinstance(x, np.ndarray):
        return f"an array {x.shape} of {x.dtype}"
    name = type(x).__name__
    return "None" if x is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
