"""make_env: environments from a Gymnasium id, `module:callable` or a callable; MinAtar (Young and Tian 2019) too."""

import contextlib
import functools
import importlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from veldt import callables
from veldt.compiled import LIGHT
from veldt.envs.atari import Atari, find_protocol
from veldt.envs.vector import Envs
from veldt.errors import UserError, did_you_mean

EnvLike = str | Callable[[], gym.Env[Any, Any]]

# By prefix of the id: the module that registers it, and our extra.
PACKAGES = {"ALE/": ("ale_py", "atari"), "MinAtar/": ("minatar.gym", "minatar")}


def make_env(env: EnvLike, n: int = 1, render: bool = False, protocol: str = "", clip: bool = False) -> Envs:
    """n environments from a Gymnasium id, `module:callable`, or a callable that returns one `gymnasium.Env`.

    `protocol` names the settings of Atari (`veldt.envs.atari`). `clip`: observations outside their space are clipped.
    """
    name = env if isinstance(env, str) else getattr(env, "__qualname__", repr(env))
    factory = _find(env) if isinstance(env, str) else env
    try:
        with warnings.catch_warnings():
            # v0 of MinAtar has all six actions and v1 the minimal set; neither is out of date.
            warnings.filterwarnings("ignore", ".*MinAtar/.* is out of date", DeprecationWarning)
            vector = _registered(str(env), n, render, protocol) if factory is None else _sync(factory, n)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} could not be made: {type(error).__name__}: {error}") from error
    return Envs(vector, name, clip)


def _registered(env: str, n: int, render: bool, protocol: str) -> VectorEnv[Any, Any, Any]:
    if is_atari(env):
        return Atari(env, n, find_protocol(protocol), render)
    if gym.spec(env).vector_entry_point is not None and not render:
        return gym.make_vec(env, n, vectorization_mode="vector_entry_point")
    return _sync(functools.partial(_one, env, render), n)


def _one(env: str, render: bool) -> gym.Env[Any, Any]:
    options: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    made = gym.make(env, disable_env_checker=True, **options)
    return SeededMinAtar(made) if env.startswith("MinAtar/") else made


def _sync(factory: Callable[[], gym.Env[Any, Any]], n: int) -> VectorEnv[Any, Any, Any]:
    return SyncVectorEnv([factory] * n, autoreset_mode=AutoresetMode.NEXT_STEP)


def is_atari(env: str) -> bool:
    return env.startswith("ALE/")


def _find(env: str) -> Callable[[], gym.Env[Any, Any]] | None:
    """The callable named by `module:callable`, or None for a registered Gymnasium id."""
    if env.rpartition(":")[0]:
        factory = callables.find(env)
        if factory is not None:
            return factory
    prefix = next((prefix for prefix in PACKAGES if env.startswith(prefix)), "")
    if prefix and not any(name.startswith(prefix) for name in gym.registry):
        package, extra = PACKAGES[prefix]
        try:
            with without_plotting() if os.environ.get(LIGHT) else contextlib.nullcontext():
                module = importlib.import_module(package)
        except ImportError:
            package = package.partition(".")[0]
            raise UserError(f"{env} needs {package}; install it with: pip install 'veldt[{extra}]'.") from None
        if hasattr(module, "register_envs"):  # other packages register on import
            module.register_envs()
    if env not in gym.registry and re.search("-v[0-9]$", env):
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers old names such as PongNoFrameskip-v4, for the error below
    try:
        gym.spec(env)
    except gym.error.Error:
        hint = did_you_mean(env.rpartition(":")[2], gym.registry)
        raise UserError(f"There is no environment {env!r}.{hint or ' Give a Gymnasium id, or module:callable.'}") from None
    if str(gym.spec(env).entry_point).startswith("ale_py") and not is_atari(env):
        game = re.split("NoFrameskip|Deterministic|-", env)[0]
        raise UserError(f"{env} returns raw screens; use ALE/{game}-v5, for which Veldt skips, merges and resizes frames.")
    return None


@contextlib.contextmanager
def without_plotting() -> Iterator[None]:
    """Hides the plotting libraries while MinAtar is imported: it works without them, and they take 120 MB of RAM."""
    absent: dict[str, Any] = {name: None for name in ("matplotlib", "seaborn") if name not in sys.modules}
    sys.modules.update(absent)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # MinAtar warns that they are missing
    try:
        yield
    finally:
        logging.disable(level)
        for name in absent:
            del sys.modules[name]


class SeededMinAtar(gym.Wrapper[Any, Any, Any, Any]):
    """Makes a seeded reset independent of what was played before it.

    With sticky actions a game may repeat the last action of the episode before, even if the reset is seeded.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.unwrapped.game.last_action = 0  # type: ignore[attr-defined]
        return self.env.reset(seed=seed, options=options)
