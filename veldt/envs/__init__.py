"""Environments that emit step records.

    make.py     make_env: from a Gymnasium id, `module:id`, `module:callable` or a callable
    find.py     environments by name, and the packages of well-known ids
    single.py   one environment of a vector, checked when it first resets and steps
    vector.py   Envs: a vector of environments that returns step records
    atari.py    Atari and the protocols of the papers
    small.py    small environments with known optima
    recall.py   environments that need a recurrent network
    reaching.py environments with continuous actions: two goals, grasping from pixels

May import records and Gymnasium; no torch.
"""

from veldt.envs import reaching as reaching  # registers the built-in environments
from veldt.envs import recall as recall  # registers the built-in environments
from veldt.envs import small as small  # registers the built-in environments
from veldt.envs.find import has_continuous_actions, is_atari
from veldt.envs.make import EnvLike, make_env
from veldt.envs.vector import Envs
from veldt.errors import EnvError

__all__ = ["EnvError", "EnvLike", "Envs", "has_continuous_actions", "is_atari", "make_env"]
