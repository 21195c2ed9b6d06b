"""make_env: vectors of environments from a Gymnasium id, `module:id`, `module:callable` or a callable."""

import functools
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from veldt import callables
from veldt.env_kwargs import read_kwargs
from veldt.envs.alone import Alone
from veldt.envs.atari import Atari, SingleAtari, find_protocol
from veldt.envs.find import find, is_atari
from veldt.envs.separate import Repeat, Separate
from veldt.envs.single import Single, check_kind, not_made
from veldt.envs.vector import Envs
from veldt.errors import UserError
from veldt.records.masks import MASK

EnvLike = str | Callable[[], gym.Env[Any, Any]]
Wrapper = str | Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]

log = logging.getLogger("veldt")


def make_env(
    env: EnvLike,
    n: int = 1,
    render: bool = False,
    protocol: str = "",
    clip: bool = False,
    kwargs: Mapping[str, Any] | Sequence[str] = (),
    wrappers: Sequence[Wrapper] = (),
    image_size: int = 0,
    grayscale: bool = False,
    combine: bool = False,
    action_masks: bool = True,
    alone: bool = False,
    frame_skip: int = 0,
    separate: bool = False,
) -> Envs:
    """n environments from a Gymnasium id, `module:id`, `module:callable`, or a callable that returns one `gymnasium.Env`.

    `protocol` names the settings of Atari (`veldt.envs.atari`). `clip`: observations outside their space are clipped.
    `kwargs` are arguments of the environment, as a dict or as texts `key=value`; `wrappers` are applied to each
    environment in this order. `action_masks`: which actions are legal is read from the observation's key or the info
    `action_mask`, where the first reset has one. `alone`: one environment without the cost of a vector, where that is
    possible. `frame_skip`: each action is repeated so often (0: as the environment or protocol has it). `separate`:
    episodes begin where `Envs.begin` says so, each with a seed of its own; an environment rests between them. The others
    are those of `veldt.records.adapter.Adapter`.
    """
    assert not alone or n == 1, n
    name = env if isinstance(env, str) else getattr(env, "__qualname__", repr(env))
    factory = find(env) if isinstance(env, str) else env
    arguments = read_kwargs(kwargs)
    around = [_wrapper(x) for x in wrappers]
    if frame_skip > 1 and not (isinstance(env, str) and is_atari(env)):
        around.append(functools.partial(Repeat, n=frame_skip))
    vector_of: Callable[..., VectorEnv[Any, Any, Any]] = Separate if separate else _alone if alone else _sync
    try:
        with warnings.catch_warnings():
            # v0 of MinAtar has all six actions and v1 the minimal set; neither is out of date.
            warnings.filterwarnings("ignore", ".*MinAtar/.* is out of date", DeprecationWarning)
            if factory is None:
                vector = _registered(str(env), n, render, protocol, arguments, around, frame_skip, vector_of)
            else:
                vector = vector_of(functools.partial(_one, functools.partial(factory, **arguments), around, name), n)
    except UserError:
        raise
    except Exception as error:
        sentence, told = not_made(name, error)
        log.error("%s\n%s", sentence, told)
        raise sentence from error
    how: dict[str, Any] = {"clip": clip, "image_size": image_size, "grayscale": grayscale, "combine": combine}
    if not action_masks:
        return Envs(vector, name, **how)
    space = vector.single_observation_space
    if isinstance(space, spaces.Dict) and MASK in space.spaces:
        return Envs(vector, name, **how, masks="observation")
    singles = [env for env in getattr(vector, "envs", ()) if isinstance(env, Single)]
    mask = singles[0].find_mask() if singles else None
    if mask is None:
        return Envs(vector, name, **how)
    envs = Envs(vector, name, **how, masks="info")
    assert envs.adapter.masks is not None
    for single in singles:
        single.masks = envs.adapter.masks.flat()
    singles[0].read({MASK: mask})  # an error before any process starts
    return envs


def _registered(
    env: str,
    n: int,
    render: bool,
    protocol: str,
    arguments: dict[str, Any],
    around: list[Any],
    frame_skip: int,
    vector_of: Callable[..., VectorEnv[Any, Any, Any]],
) -> VectorEnv[Any, Any, Any]:
    env_id = env.rpartition(":")[2]
    if is_atari(env):
        if arguments or around:
            raise UserError(f"{env} runs in ale-py's C++ vector: it takes neither env_kwargs nor wrappers; see --protocol.")
        found = find_protocol(protocol)
        found = replace(found, frame_skip=frame_skip or found.frame_skip)
        if vector_of is Separate:
            return Separate(functools.partial(SingleAtari, env_id, found), n)
        return Atari(env_id, n, found, render)
    spec = gym.spec(env_id)
    # Vectors of other packages reset as they like.
    native = spec.entry_point is None or str(spec.vector_entry_point).startswith(("gymnasium.", "veldt."))
    vectors = vector_of is _sync and spec.vector_entry_point is not None
    if vectors and native and not render and not around:
        return gym.make_vec(env_id, n, vectorization_mode="vector_entry_point", **arguments)
    options: dict[str, Any] = ({"render_mode": "rgb_array"} if render else {}) | arguments
    return vector_of(functools.partial(_one, functools.partial(_by_id, env_id, options), around, env), n)


def _by_id(env: str, options: dict[str, Any]) -> gym.Env[Any, Any]:
    made = gym.make(env, disable_env_checker=True, **options)
    return SeededMinAtar(made) if env.startswith("MinAtar/") else made


def _one(factory: Callable[[], Any], around: list[Any], name: str) -> gym.Env[Any, Any]:
    env = factory()
    check_kind(env, name)
    for wrap in around:
        env = wrap(env)
    return Single(env, name)


def _alone(factory: Callable[[], gym.Env[Any, Any]], _: int) -> VectorEnv[Any, Any, Any]:
    return Alone(factory())


def _sync(factory: Callable[[], gym.Env[Any, Any]], n: int) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([factory] * n, autoreset_mode=AutoresetMode.NEXT_STEP)


def _wrapper(wrapper: Wrapper) -> Callable[[Any], Any]:
    if not isinstance(wrapper, str):
        return wrapper
    found = callables.find(wrapper)
    if found is None:
        raise UserError(f"There is no callable {wrapper!r} that wraps an environment.")
    return found


class SeededMinAtar(gym.Wrapper[Any, Any, Any, Any]):
    """Makes a seeded reset independent of what was played before it.

    With sticky actions a game may repeat the last action of the episode before, even if the reset is seeded.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)
