"""The spec of an environment is read back as it was written, and nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from veldt.errors import UserError
from veldt.experiment import saved_spec
from veldt.records.step import EnvSpec
from veldt.records.tree import spec

EDGE = np.array([-np.inf, 0.1, np.float32(1e-30)], np.float32)
SPACES = [
    spaces.Discrete(3),
    spaces.Discrete(2, start=-5),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, 1], [-1, 0]]),
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.Box(EDGE, np.array([np.inf, 0.1, 7], np.float32), dtype=np.float32),
    spaces.Box(-np.inf, np.inf, (1, 2), np.float64),
    spaces.Box(0, 255, (3,), np.uint8),
    spaces.Box(-1, 1, (), np.float32),
]


def env(space: spaces.Space[Any]) -> EnvSpec:
    dtype = np.int64 if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else np.float32
    observation = {"obs/image": spec((84, 84), np.uint8), "obs/place": spec((3,), np.float32)}
    return EnvSpec("my:Env", observation, spec(space.shape or (), dtype), space)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_spec_is_read_back_as_it_was(space: spaces.Space[Any], tmp_path: Path) -> None:
    saved_spec.write(tmp_path, env(space))
    back = saved_spec.read(tmp_path)
    assert back == env(space)
    assert str(back.action_space) == str(space) and back.action_space.dtype == space.dtype
    if isinstance(space, spaces.Box):  # `==` of spaces allows rounding
        assert isinstance(back.action_space, spaces.Box)
        assert np.array_equal(back.action_space.low, space.low) and np.array_equal(back.action_space.high, space.high)


def test_an_older_run_has_none(tmp_path: Path) -> None:
    assert saved_spec.read(tmp_path) is None


BAD = {
    "format": "pickle",
    "version": 2,
    "name": 3,
    "observation": {},
    "observation.obs/image": {"shape": [84, 84], "dtype": "O"},
    "observation.obs/image.shape": [2**20, 2**20],
    "observation.obs/place.shape": [True],
    "observation.obs/place.dtype": "float32; import os",
    "observation.reward": {"shape": [], "dtype": "float32"},
    "action.shape": [3],
    "action": [1],
    "action_space": "Box(0, 1, (2,), float32)",
    "action_space.type": "Tuple",
    "action_space.shape": [-1],
    "action_space.dtype": "bool",
    "action_space.low": ["nan"],
    "action_space.low+": [float("nan")],
    "action_space.low++": [1e39],
    "action_space.low+++": [10**400],
    "action_space.high": [-2.0],
    "action_space.high+": [1, 1, 1],
    "action_space.high++": [[1], [1]],
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_in_a_spec_is_named(name: str, tmp_path: Path) -> None:
    saved_spec.write(tmp_path, env(spaces.Box(-1, 1, (2,), np.float32)))
    file = tmp_path / saved_spec.FILE
    saved: Any = json.loads(file.read_text())
    *path, last = name.rstrip("+").split(".")
    owner = saved
    for key in path:
        owner = owner[key]
    owner[last] = BAD[name]
    file.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=rf"env_spec.json has an invalid {path[0] if path else last}"):
        saved_spec.read(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "\x00", "null", "[]"])
def test_what_is_no_spec_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / saved_spec.FILE).write_text(text)
    with pytest.raises(UserError, match=r"env_spec.json (is not valid JSON|has an invalid format)"):
        saved_spec.read(tmp_path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    saved_spec.write(tmp_path, env(SPACES[0]))
    (tmp_path / saved_spec.FILE).rename(tmp_path / "elsewhere")
    (tmp_path / saved_spec.FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="it is a symbolic link"):
        saved_spec.read(tmp_path)


def test_a_difference_is_one_sentence() -> None:
    one, two = env(SPACES[0]), env(SPACES[1])
    assert saved_spec.difference(one, one) == ""
    assert saved_spec.difference(one, two) == (
        "its actions are Discrete(2, start=-5), but those of the run are Discrete(3)"
    )
    fewer = EnvSpec("x", {"obs/place": spec((4,), np.float32)}, one.action, one.action_space)
    assert saved_spec.difference(one, fewer) == (
        "its observation obs/image is absent, but that of the run is [84, 84] uint8"
    )
    with pytest.raises(UserError, match=r"x does not fit runs/a: its observation obs/image"):
        saved_spec.check_fits(one, fewer, Path("runs/a"))
