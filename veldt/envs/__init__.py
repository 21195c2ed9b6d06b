"""Environments: `make_env` turns a Gymnasium id, `module:callable` or a callable into a vector of environments that emits
step records."""

from __future__ import annotations

from veldt.envs import memory as memory  # registers the built-in environments
from veldt.envs import small as small  # registers the built-in environments
from veldt.envs.vector import EnvError, EnvLike, Envs, is_atari, make_env

__all__ = ["EnvError", "EnvLike", "Envs", "is_atari", "make_env"]
