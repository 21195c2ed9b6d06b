"""Environments by name: Gymnasium ids, `module:id`, `module:callable`; and the packages of well-known ids."""

import contextlib
import importlib.util
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

from veldt import callables
from veldt.compiled import LIGHT
from veldt.errors import UserError, did_you_mean

Factory = Callable[..., gym.Env[Any, Any]]


class Family(NamedTuple):
    """Ids that one package registers."""

    ids: str  # a pattern of their beginnings
    module: str  # to import; empty: there is none for Gymnasium
    package: str  # to install


FAMILIES = (
    Family("ALE/", "ale_py", "veldt[atari]"),
    Family("MinAtar/", "minatar.gym", "veldt[minatar]"),
    Family("MiniGrid-|BabyAI-", "minigrid", "minigrid"),
    Family(
        "(highway|merge|roundabout|parking|intersection|racetrack|exit|lane-keeping|two-way|u-turn)(-|$)",
        "highway_env",
        "highway-env",
    ),
    Family(
        "Fetch|HandReach|HandManipulate|AntMaze|PointMaze|AdroitHand|FrankaKitchen",
        "gymnasium_robotics",
        "gymnasium-robotics",
    ),
    Family("Panda[A-Z]", "panda_gym", "panda-gym"),
    Family("FlappyBird-", "flappy_bird_gymnasium", "flappy-bird-gymnasium"),
    Family("Meta-World/", "metaworld", "metaworld"),
    Family("Vizdoom", "vizdoom.gymnasium_wrapper", "vizdoom"),
    Family("popgym-", "popgym", "popgym"),
    Family("bsuite/", "shimmy", "shimmy[bsuite]"),
    Family("dm_control/", "shimmy", "shimmy[dm-control]"),
    Family("procgen-|SuperMarioBros|.*BulletEnv-", "", ""),
)


def is_atari(env: str) -> bool:
    return env.rpartition(":")[2].startswith("ALE/")


_continuous: dict[str, tuple[EnvSpec, bool]] = {}  # ids that were looked at, as they were registered then


def has_continuous_actions(env: str) -> bool:
    """Whether a Gymnasium id has Box actions of floats. False where that is not known: if it cannot be made, and for
    `module:...`, which is not imported to find out. It is made once in a process, however many configs ask."""
    if ":" in env or is_atari(env):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            find(env)
            registered = gym.spec(env)
    except Exception:  # of any kind; whoever makes it to use it reports that
        return False
    if env not in _continuous or _continuous[env][0] is not registered:
        _continuous[env] = registered, _makes_floats(env)
    return _continuous[env][1]


def _makes_floats(env: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = gym.make(env, disable_env_checker=True)
            space = made.action_space
            with contextlib.suppress(Exception):
                made.close()
    except Exception:  # as above
        return False
    return isinstance(space, gym.spaces.Box) and bool(np.issubdtype(space.dtype, np.floating))


def find(env: str) -> Factory | None:
    """The callable that is named, or None for an id that is registered now. Packages of known ids are imported."""
    module, _, name = env.rpartition(":")
    if module:
        _require_installed(env, module.partition(".")[0])
        factory = callables.find(env)
        if factory is not None:
            return factory
    elif (family := family_of(env)) is not None and env not in gym.registry:
        _register(env, family)
    if not module and env not in gym.registry and re.search("-v[0-9]$", env):
        with contextlib.suppress(ImportError):
            importlib.import_module("ale_py")  # registers old names such as PongNoFrameskip-v4, for the error below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a sentence of ours follows
            spec = gym.spec(name)
    except gym.error.Error:
        hint = did_you_mean(name, gym.registry)
        what = f"; {module} has no such function, and registers no such id" if module else ""
        otherwise = " Give a Gymnasium id, module:id or module:callable." if not module else ""
        raise UserError(f"There is no environment {env!r}{what}.{hint or otherwise}") from None
    if str(spec.entry_point).startswith("ale_py") and not is_atari(env):
        game = re.split("NoFrameskip|Deterministic|-", name)[0]
        raise UserError(f"{env} returns raw screens; use ALE/{game}-v5, for which Veldt skips, merges and resizes frames.")
    return None


def _require_installed(env: str, package: str) -> None:
    """Raises a UserError that says what to install, if it is a package that is known here."""
    known = next((family for family in FAMILIES if family.module.partition(".")[0] == package), None)
    if known is not None and sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        raise UserError(f"{env} needs {package}; install it with: pip install '{known.package}'.")


def family_of(env: str) -> Family | None:
    return next((family for family in FAMILIES if re.match(family.ids, env)), None)


def _register(env: str, family: Family) -> None:
    """Imports the package that registers an id."""
    if not family.module:
        raise UserError(
            f"{env} is of a package for the old Gym, not for Gymnasium; write a function that wraps it with shimmy "
            "(GymV21CompatibilityV0) and name it module:function."
        )
    try:
        with without_plotting() if os.environ.get(LIGHT) else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(family.module)
            # Most packages register on import, these when asked.
            for function in ("register_envs", "register_robotics_envs", "register_gymnasium_envs"):
                if hasattr(module, function):
                    getattr(module, function)()
        if not any(re.match(family.ids, name) for name in gym.registry):
            raise UserError(f"{env}: {family.module} is there, but not what it needs: pip install '{family.package}'.")
    except UserError:
        raise
    except ImportError as error:
        missing = str(getattr(error, "name", None) or "").partition(".")[0]
        package = family.module.partition(".")[0]
        which = package if missing in ("", package) else f"{package}, which needs {missing}"
        raise UserError(f"{env} needs {which}; install it with: pip install '{family.package}'.") from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"{env} needs {family.module}, which cannot be imported here ({why}).") from error


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
