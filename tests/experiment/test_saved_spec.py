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
from veldt.records.adapter import Adapter
from veldt.records.step import EnvSpec

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


OBSERVATIONS = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (84, 84, 3), np.uint8),
        "goal": spaces.Tuple([spaces.Discrete(5, start=1), spaces.Text(9), spaces.MultiBinary((2, 3))]),
        "place": spaces.Box(EDGE, np.inf, (3,), np.float32),
        "seen": spaces.Box(0, 1, (4,), np.bool_),
        "long": spaces.Box(0, 1, (2,), np.longdouble),
    }
)


SETTINGS: dict[str, Any] = {"image_size": 42, "grayscale": True, "combine": True, "masks": ""}


def env(space: spaces.Space[Any], name: str = "my:Env", **settings: Any) -> EnvSpec:
    return EnvSpec.of(name, Adapter(OBSERVATIONS, space, name, **SETTINGS | settings))


def equal(one: spaces.Space[Any], two: spaces.Space[Any]) -> bool:
    """Without rounding, which `==` of spaces allows."""
    if isinstance(one, spaces.Box) and isinstance(two, spaces.Box):
        return one.dtype == two.dtype and np.array_equal(one.low, two.low) and np.array_equal(one.high, two.high)
    return one == two and one.dtype == two.dtype


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_spec_is_read_back_as_it_was(space: spaces.Space[Any], tmp_path: Path) -> None:
    saved_spec.write(tmp_path, env(space))
    back = saved_spec.read(tmp_path)
    assert back == env(space) and back.adapter is not None and back.adapter.settings == SETTINGS
    assert list(back.observation) == list(env(space).observation) and back.categories == {"obs/goal.0": (5,)}
    assert str(back.action_space) == str(env(space).action_space) and equal(back.adapter.taken, space)
    assert isinstance(back.adapter.observation_space, spaces.Dict)
    for name in ("image", "place", "seen"):
        assert equal(back.adapter.observation_space[name], OBSERVATIONS[name])
    seen = {key: part.sample() for key, part in OBSERVATIONS.items() if key != "long"} | {
        "long": np.zeros(2, np.longdouble)
    }
    for name, x in env(space).adapter.observation(seen).items():  # type: ignore[union-attr]
        np.testing.assert_array_equal(back.adapter.observation(seen)[name], x)


def test_an_older_run_has_none(tmp_path: Path) -> None:
    assert saved_spec.read(tmp_path) is None


BAD = {
    "format": "pickle",
    "version": 2,
    "name": 3,
    "settings": {"image_size": 4},
    "settings.image_size": 2**40,
    "settings.combine": 1,
    "settings.masks": "somewhere",
    "settings.masks+": "observation",
    "observation_space": {},
    "observation_space.spaces": {},
    "observation_space.spaces.image": {"type": "Box", "shape": [84, 84], "dtype": "O"},
    "observation_space.spaces.image.shape": [2**20, 2**20],
    "observation_space.spaces.place.shape": [True],
    "observation_space.spaces.place.dtype": "float32; import os",
    "observation_space.spaces.goal.spaces": 3,
    "action_space.shape": [3],
    "action_space": "Box(0, 1, (2,), float32)",
    "action_space.type": "Sequence",
    "action_space.shape+": [-1],
    "action_space.dtype": "complex64",
    "action_space.low": ["nan"],
    "action_space.low+": [float("nan")],
    "action_space.low++": [1e39],
    "action_space.low+++": [10**400],
    "action_space.high": [-2.0],
    "action_space.high+": [1, 1, 1],
    "action_space.high++": [[1], [1]],
    "action_space+": {"type": "Discrete", "dtype": "int8", "n": 300, "start": 0},
    "action_space++": {"type": "Tuple", "spaces": [{"type": "MultiBinary", "shape": [2**20]}] * 17},
    "observation_space.spaces.goal.spaces+": [{"type": "MultiBinary", "shape": [0]}],
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_in_a_spec_is_named(name: str, tmp_path: Path) -> None:
    saved_spec.write(tmp_path, env(spaces.Box(np.float32([-1, -2]), np.float32([1, 2]))))
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
    fewer = EnvSpec.of("x", Adapter(spaces.Dict({"place": spaces.Box(-1, 1, (4,))}), spaces.Discrete(3), "x"))
    assert saved_spec.difference(one, fewer) == ("its observation obs/goal.0 is absent, but that of the run is [] int16")
    with pytest.raises(UserError, match=r"x does not fit runs/a: its observation obs/goal"):
        saved_spec.check_fits(one, fewer, Path("runs/a"))
