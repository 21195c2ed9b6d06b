"""Demonstration sets: that they hold what was played and nothing else, and that nothing damaged is ever believed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_valid
from oracles import Faulty, Tracer, counter_record, examples, window_starts
from safetensors.numpy import load_file, save_file
from test_cli import refused
from test_run import tiny

import veldt.demos.recording as module
from veldt.__main__ import main
from veldt.acting.actor import Actor
from veldt.acting.recorder import Recorder
from veldt.algorithms.dqn import DQN
from veldt.cli.demos import histogram
from veldt.counters import Counters
from veldt.demos.recording import Recording, Scripted, make_played, play, record
from veldt.demos.set import Demos
from veldt.envs import Envs, make_env
from veldt.envs.small import Counter
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.records.block import Block, Schema, Window
from veldt.records.tree import Tree
from veldt.seeds import derive
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Prioritized
from veldt.topologies.stores import cut_blocks

Captured = pytest.CaptureFixture[str]
COUNTER = "veldt/Counter-v0"


# Experts.


def balance(env: Any) -> Callable[[Any], Any]:
    return lambda obs: obs[2] + 0.3 * obs[3] + 0.02 * obs[0] + 0.05 * obs[1] > 0


def catch(env: Any) -> Callable[[Any], Any]:
    """Looks where the ball is, as no agent can."""
    return lambda obs: 1 + (env.ball > env.paddle) - (env.ball < env.paddle)


def at_random(env: Any) -> Callable[[Any], Any]:
    return lambda obs: random.randrange(int(env.action_space.n))


def forgets(env: Any) -> Callable[[Any], Any]:
    """Takes the actions 0, 1, 2, 2, ... of an episode: one that knew more than one episode would not."""
    taken: list[int] = []

    def act(obs: Any) -> int:
        taken.append(min(2, len(taken)))
        return taken[-1]

    return act


def interrupts(env: Any) -> Callable[[Any], Any]:
    """Presses Ctrl-C in the middle of episode `interrupts.at`."""

    def act(obs: Any) -> int:
        if obs[1] == interrupts.at and obs[2] == 1:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGINT)
        return 0

    return act


def fails(env: Any) -> Callable[[Any], Any]:
    return lambda obs: 1 // (3 - int(obs[1]))


def wrong(env: Any) -> Callable[[Any], Any]:
    return lambda obs: 7


def no_expert(env: Any) -> Any:
    return 3


ME = f"{__name__}:"


def recorded(path: Path, make: Any, env: str = COUNTER, episodes: int = 8, **options: Any) -> Demos:
    random.seed(1)
    envs, game = make_played(env, options.pop("protocol", ""))
    try:
        demos = record(path, envs, Scripted(make, game, envs.spec), episodes, **options)
    finally:
        envs.close()
    assert demos is not None
    return demos


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD", 700)  # 12 rows of a Counter: episodes lie in up to three


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Demos:
    return recorded(tmp_path_factory.mktemp("demos") / "counter", at_random, episodes=12)


# What is in a set.


def test_records_are_those_of_the_environment(tmp_path: Path, small_shards: None) -> None:
    """Each record says where it belongs, what it must hold, and which action led to it."""
    demos = recorded(tmp_path / "d", at_random, episodes=30)
    assert len(demos.shards) > 5
    env = int(derive(0, "demonstrations", 0) % 2**31)
    for number, episode in enumerate(demos.episodes()):
        length = Counter.length(env, number, 12)
        assert episode["obs"].dtype == np.int64 and episode["first"].dtype == np.bool_
        assert episode["obs"][:, 1].tolist() == [number] * (length + 1)
        assert episode["obs"][:, 2].tolist() == list(range(length + 1))
        assert episode["obs"][1:, 3].tolist() == episode["action"][:-1].tolist(), "taken AT t"
        assert episode["action"][-1] == 0 and episode["valid"].all()
        for t, obs in enumerate(episode["obs"]):
            expected = counter_record(obs)
            assert {name: episode[name][t] for name in expected} == expected
        assert demos.lengths[number] == length
        assert demos.returns[number] == sum(Counter.reward(*obs) for obs in episode["obs"].tolist())
    assert number == 29 and len(demos) == 30 and demos.steps == demos.lengths.sum()
    assert (demos.env, demos.seed, demos.discarded, demos.protocol) == (COUNTER, 0, 0, None)
    assert Counter.length(env, 0, 12) > 0 and max(demos.lengths) == 12


def test_what_was_read_is_what_was_played_however_it_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = []
    for number, size in enumerate((1, 700, 2_000, 10**9)):
        monkeypatch.setattr(module, "SHARD", size)
        demos = recorded(tmp_path / str(number), at_random, "veldt/Catch-v0", episodes=4)
        sets.append(list(demos.episodes()))
        assert len(demos.shards) == {1: demos.stops[-1], 10**9: 1}.get(size, len(demos.shards))
        biggest = max((tmp_path / str(number) / shard.file).stat().st_size for shard in demos.shards)
        assert biggest < size + 1_000, "a shard is bounded, but for its header"
    envs, game = make_played("veldt/Catch-v0")
    random.seed(1)
    sets.append(list(islice(play(envs, Scripted(at_random, game, envs.spec), 0), 4)))
    assert sets[0][0]["obs"].dtype == np.uint8
    for other in sets[1:]:
        for a, b in zip(sets[0], other, strict=True):
            assert list(a) == list(b) and all(np.array_equal(a[name], b[name]) for name in a)


class Sink:
    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def insert(self, block: Block, priorities: Any) -> bool:
        self.blocks.append(block)
        return True


class Again:
    """A policy that takes given actions one after another."""

    def __init__(self, actions: Any) -> None:
        self.actions = iter(actions)

    def send(self, group: int, step: Tree) -> bool:
        return True

    def recv(self, group: int) -> Tree:
        return {"action": next(self.actions)[None]}

    def flush(self, group: int) -> bool:
        return True

    def reset(self, group: int) -> None:
        pass


def seen_by_an_actor(make: Callable[[int], Envs], actions: Any, seed: int, cut: bool = False) -> Tree:
    """What an actor and its recorder make of these actions: the rows of one block that holds them all."""
    envs = make(1)
    schema = Schema({**envs.spec.step, "action": envs.spec.action}, Window(), len(actions))
    sink: Any = Sink()
    recorder = Recorder(Again(actions), sink, Tracer(Window()), schema)  # type: ignore[arg-type]
    actor = Actor(make, 1, recorder, Counters(), seed=0)
    actor.groups[0].begin(derive(seed, "demonstrations", 0))
    for _ in range(len(actions) - cut):
        actor.step()
    assert not cut or actor.cut()
    assert recorder.flush(0)
    actor.close(), envs.close()
    assert len(sink.blocks) == 1
    return sink.blocks[0].columns()


@pytest.mark.parametrize(
    ("env", "make"),
    [("CartPole-v1", balance), ("veldt/Catch-v0", catch), (COUNTER, at_random), ("MinAtar/Breakout-v1", at_random)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_records_are_those_an_actor_makes_of_the_same_actions(tmp_path: Path, env: str, make: Any) -> None:
    """CartPole also because an actor plays its vector version, and an expert the plain one."""
    demos = recorded(tmp_path / "d", make, env, episodes=3, seed=5)
    ours = {name: np.concatenate([e[name] for e in demos.episodes()]) for name in demos.columns}
    theirs = seen_by_an_actor(lambda n: make_env(env, n), ours["action"], 5)
    assert set(ours) == set(theirs)
    for name, x in theirs.items():
        assert x.dtype == ours[name].dtype and np.array_equal(x, ours[name]), name
    if env == "CartPole-v1":
        assert demos.returns.min() > 400 and ours["last"].sum() == 3


def test_atari_is_played_by_its_protocol_and_cut_as_an_actor_cuts(tmp_path: Path) -> None:
    env = "ALE/Pong-v5"
    demos = recorded(
        tmp_path / "d", lambda game: lambda obs: int(obs[40:60].sum()) % 4, env, 2, max_length=9, protocol="apex"
    )
    assert demos.protocol is not None and demos.protocol["name"] == "apex" and demos.protocol["full_actions"]
    one, two = demos.episodes()
    assert one["obs"].shape == (10, 84, 84) and one["obs"].dtype == np.uint8
    assert one["last"].tolist() == [False] * 9 + [True] and one["discount"][-1] == 1, "truncated"
    assert not np.array_equal(one["obs"], two["obs"]), "the second begins with another seed"
    theirs = seen_by_an_actor(lambda n: make_env(env, n, protocol="apex"), one["action"], 0, cut=True)
    for name, x in theirs.items():
        assert np.array_equal(x, one[name]), name

    spec = make_env(env, protocol="apex").spec
    demos.check(spec, "apex")
    with pytest.raises(UserError, match=r"not played with protocol 'r2d2': life_loss is True there and False here"):
        demos.check(spec, "r2d2")
    with pytest.raises(UserError, match=r"action space is Discrete\(18\), but that of the environment is Discrete\(6\)"):
        demos.check(make_env(env).spec)
    with pytest.raises(UserError, match="are of ALE/Pong-v5, not of ALE/Boxing-v5"):
        demos.check(make_env("ALE/Boxing-v5", protocol="apex").spec, "apex")


def test_a_bad_observation_is_recorded_as_not_valid(tmp_path: Path) -> None:
    envs = make_env(Faulty)
    demos = record(tmp_path / "d", envs, Scripted(at_random, envs.env.envs[0], envs.spec), 20)
    assert demos is not None
    rows = {name: np.concatenate([e[name] for e in demos.episodes()]) for name in demos.columns}
    assert 0 < (~rows["valid"]).sum() == envs.bad
    assert not rows["obs"][~rows["valid"]].any() and rows["obs"][rows["valid"] & ~rows["first"]].any(1).all()


@pytest.mark.parametrize("env", ["CartPole-v1", "veldt/MaskedCartPole-v0"])
def test_an_expert_is_given_the_very_game_that_is_played(env: str) -> None:
    """Also where many would be played at once, by a vector version that has no game for itself."""
    envs, game = make_played(env)
    told: list[bool] = []

    def looks(env: Any) -> Callable[[Any], Any]:
        def act(obs: Any) -> int:
            told.append(np.array_equal(np.float32(env.state)[[0, 2]], obs[[0, -2]] if len(obs) == 4 else obs))
            return 0

        return act

    next(play(envs, Scripted(looks, game, envs.spec), 0))
    assert game is game.unwrapped and envs.name == envs.spec.name == env
    assert len(told) > 5 and all(told)


def test_an_expert_lives_for_one_episode(tmp_path: Path) -> None:
    demos = recorded(tmp_path / "d", forgets, episodes=12)
    for episode in demos.episodes():
        length = len(episode["action"]) - 1
        assert episode["action"][:-1].tolist() == [0, 1, *[2] * 12][:length]


class Game(gym.Env[Any, Any]):
    """Two steps of a space for actions and one for observations; remembers what it was given."""

    def __init__(self, action: Any, observation: Any) -> None:
        self.action_space, self.observation_space = action, observation
        self.given: list[Any] = []

    def reset(self, **kwargs: Any) -> Any:
        super().reset(seed=kwargs.get("seed"))
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.given.append(action)
        self.t += 1
        return self.observation_space.sample(), 1.0, self.t == 2, False, {}


DICT = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float64), "b": spaces.Box(0, 255, (3,), np.uint8)})


@pytest.mark.parametrize(
    ("space", "action", "stored"),
    [
        (spaces.Discrete(3, start=5), 6, 1),
        (spaces.Discrete(2), np.True_, 1),
        (spaces.MultiDiscrete([3, 4]), [2, 3], [2, 3]),
        (spaces.Box(-2, 2, (2,)), [0.5, -9.0], [0.5, -2.0]),
    ],
    ids=str,
)
def test_an_expert_speaks_the_actions_of_its_environment(tmp_path: Path, space: Any, action: Any, stored: Any) -> None:
    envs = make_env(lambda: Game(space, DICT))
    game = envs.env.envs[0].unwrapped
    seen: list[Any] = []
    policy = Scripted(lambda game: lambda obs: (seen.append(obs), action)[1], game, envs.spec)
    demos = record(tmp_path / "d", envs, policy, 1)
    assert demos is not None
    demos.check(envs.spec)
    (episode,) = demos.episodes()
    assert episode["action"].tolist() == [stored, stored, np.zeros_like(stored).tolist()]
    applied = np.asarray(stored) + getattr(space, "start", 0)
    assert all(np.array_equal(given, applied) for given in game.given) and len(game.given) == 2
    assert [list(obs) for obs in seen] == [["a", "b"]] * 2
    assert np.array_equal([obs["a"] for obs in seen], episode["obs/a"][:2])


COMPOSED = [
    (spaces.MultiDiscrete([2, 3], start=[1, 5]), [2, 6], [1, 1], 4),
    (spaces.Box(-1, 1, (2,), np.int32), [-1, 1], [0, 2], 2),
    (spaces.Dict({"a": spaces.Discrete(3, start=5), "b": spaces.MultiBinary(2)}), {"a": 6, "b": [0, 1]}, [1, 0, 1], 5),
    (spaces.Tuple([spaces.Discrete(2, start=-1)]), (0,), [1], 1),
]


@pytest.mark.parametrize("combine", [False, True])
@pytest.mark.parametrize(("space", "action", "parts", "number"), COMPOSED, ids=str)
def test_an_expert_speaks_the_actions_of_its_environment_where_records_have_others(
    tmp_path: Path, space: Any, action: Any, parts: list[int], number: int, combine: bool
) -> None:
    envs = make_env(lambda: Game(space, DICT), combine=combine)
    game = envs.env.envs[0].unwrapped
    demos = record(tmp_path / "d", envs, Scripted(lambda game: lambda obs: action, game, envs.spec), 1)
    assert demos is not None
    demos.check(envs.spec)
    (episode,) = demos.episodes()
    assert episode["action"][0].tolist() == (number if combine else parts)
    np.testing.assert_array_equal(spaces.flatten(space, game.given[0]), spaces.flatten(space, action))


def test_a_set_of_choices_fits_the_recipe_that_learns_from_it(tmp_path: Path) -> None:
    (tmp_path / "lamps.py").write_text(
        "import gymnasium as gym\nimport numpy as np\nfrom gymnasium import spaces\n"
        "class Lamps(gym.Env):\n"
        "    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.MultiBinary(2)\n"
        "    def reset(self, *, seed=None, options=None):\n        return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n        return np.zeros(2, np.float32), 1.0, True, False, {}\n"
        "def expert(game):\n    return lambda obs: np.array([1, 0])\n"
    )
    file = tmp_path / "lamps.py"
    argv = ["record", "--policy", f"{file}:expert", "--env", f"{file}:Lamps", "--episodes", "2", "--quiet"]
    assert main([*argv, "-o", str(tmp_path / "d")]) == 0
    config = recipes.make("r2d3", f"{file}:Lamps")
    Demos.open(tmp_path / "d").check(config.env_spec())


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]), (0,)),
        (spaces.Tuple([spaces.Discrete(2)]), (2,)),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 0}),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 1.0}),
        (spaces.MultiBinary(2), [1, 2]),
        (spaces.MultiBinary(2), None),
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3, start=5), 4),
        (spaces.Discrete(3), 1.0),
        (spaces.Discrete(3), [1]),
        (spaces.Discrete(3), None),
        (spaces.MultiDiscrete([3, 4]), [3, 0]),
        (spaces.Box(-1, 1, (2,)), [0.0, np.nan]),
        (spaces.Box(-1, 1, (2,)), [0.0]),
        (spaces.Box(-1, 1, (2,)), [[0.0], [1.0, 2.0]]),
    ],
    ids=str,
)
def test_an_action_outside_its_space_is_told(tmp_path: Path, space: Any, action: Any) -> None:
    envs = make_env(lambda: Game(space, DICT))
    policy = Scripted(lambda game: lambda obs: action, envs.env.envs[0], envs.spec)
    with pytest.raises(UserError, match=r"the expert returned the action .* which is not in"):
        record(tmp_path / "d", envs, policy, 1)
    assert not (tmp_path / "d").exists()


def test_only_good_episodes_are_kept(tmp_path: Path, small_shards: None) -> None:
    every = recorded(tmp_path / "all", lambda game: lambda obs: 0, episodes=60)
    least = float(np.median(every.returns))
    good = recorded(tmp_path / "good", lambda game: lambda obs: 0, episodes=20, min_return=least)
    wanted = [e for e, total in zip(every.episodes(), every.returns, strict=True) if total >= least][:20]
    assert len(good) == len(wanted) == 20 and good.returns.min() >= least and good.discarded > 0
    for a, b in zip(good.episodes(), wanted, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)


def test_who_is_never_good_enough_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Only 0 of 40 episodes returned 1000 or more, not 2; the best had"):
        recorded(tmp_path / "d", at_random, episodes=2, min_return=1000)
    assert not (tmp_path / "d").exists()
    returns = recorded(tmp_path / "all", at_random, episodes=40).returns
    least = np.sort(returns)[-2]
    with pytest.raises(UserError, match=r"They are in"):
        recorded(tmp_path / "few", at_random, episodes=6, min_return=float(np.sort(returns)[-1]))
    assert 0 < len(Demos.open(tmp_path / "few")) < 6 and Demos.open(tmp_path / "few").returns.min() >= least


# Blocks.

WINDOWS = [
    Window(),
    Window(history=3, lookahead=2),
    Window(history=1, burn_in=4, length=8, lookahead=3, stride=4),
    Window(history=2, burn_in=1, length=5, lookahead=1, stride=5),
    Window(burn_in=20, length=40, lookahead=5, stride=20),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("strides", [1, 3])
def test_every_window_is_a_piece_of_one_episode(counter: Demos, window: Window, strides: int) -> None:
    """By definition: a window at step o of an episode holds its rows o - before ... o + length + lookahead - 1, and
    padding where the episode has none; and there is one for every multiple of the stride that something trains in."""
    spec = make_env(COUNTER).spec
    algorithm: Any = Tracer(window)
    rows = {**spec.step, "action": spec.action, **algorithm.extras(spec)}
    schema = Schema(rows, window, strides * window.stride, algorithm.state(spec))
    episodes, found = list(counter.episodes()), []
    for number, block in enumerate(cut_blocks(counter, schema, algorithm)):
        assert block.items.any()
        columns = block.columns()
        for s in np.flatnonzero(block.items):
            place = s * window.stride
            _, episode, o, _ = columns["obs"][place + window.before].tolist()
            found.append((episode, o))
            whole = episodes[episode]
            for t in range(window.rows):
                at, row = o - window.before + t, place + t
                assert columns["valid"][row] == (0 <= at < len(whole["first"])), (number, s, t)
                if columns["valid"][row]:
                    assert all(np.array_equal(columns[name][row], whole[name][at]) for name in whole)
            assert columns["first"][place : place + window.rows][columns["valid"][place : place + window.rows]].sum() <= 1
        assert not any(columns[name].any() for name in algorithm.extras(spec))
        assert not any(x.any() for x in schema.start_layout.columns(block.starts).values())
    expected = [(e, o) for e, rows in enumerate(episodes) for o in window_starts(rows["valid"], rows["last"], window)]
    assert found == expected and len(found) > 10


def test_blocks_go_into_a_store_and_every_sample_is_a_record_of_one_episode(counter: Demos) -> None:
    spec = make_env(COUNTER).spec
    algorithm = DQN(n=3, history=2)
    schema = Schema({**spec.step, "action": spec.action, **algorithm.extras(spec)}, algorithm.window, 8)
    store = Replay(schema, Prioritized(64 * 8, 0), MinSize(), 10**6, 64)
    for block in cut_blocks(counter, schema, algorithm):
        assert store.insert(block, None)
    check_valid(store)
    assert store.metrics()["store_items"] == counter.steps, "every action that was taken can be learned from, once"
    sample = store.sample(200)
    assert sample is not None
    at = algorithm.window.before
    for obs, valid in zip(sample.rows["obs"], sample.rows["valid"], strict=True):
        assert valid[at] and len(set(obs[at:][valid[at:]][:, 1].tolist())) == 1
    assert len(set(sample.weights.round(6).tolist())) == 1, "all are of the largest priority"


# What ends a recording, and what cannot be believed.


def tree_of(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_at_no_moment_does_a_set_look_whole_before_it_is(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the directory before and after each change of it is what a kill at that moment would leave."""
    moments: list[Path] = []

    def photograph() -> None:
        if (tmp_path / "d").is_dir():
            moments.append(tmp_path / f"moment-{len(moments)}")
            shutil.copytree(tmp_path / "d", moments[-1])

    for name in ("rename", "fsync", "unlink"):
        real = getattr(os, name)

        def around(*args: Any, real: Any = real, **options: Any) -> Any:
            photograph()
            out = real(*args, **options)
            photograph()
            return out

        monkeypatch.setattr(os, name, around)
    demos = recorded(tmp_path / "d", at_random, episodes=6)
    monkeypatch.undo()
    assert len(moments) > 4 * len(demos.shards) > 8
    whole = 0
    for moment in moments:
        if (moment / "manifest.json").exists():
            assert Demos.open(moment).returns.tolist() == demos.returns.tolist()
            whole += 1
            continue
        with pytest.raises(
            UserError, match=r"has no manifest\.json, its recording was cut off; delete it and record again"
        ):
            Demos.open(moment)
        with pytest.raises(UserError, match="holds something that was cut off already"):
            recorded(moment, at_random)
    assert 0 < whole < len(moments)
    assert tree_of(demos.path) == {"manifest.json", *(shard.file for shard in demos.shards)}


KILLED = """
import sys, time
from pathlib import Path
from veldt.demos import recording
from veldt.demos.recording import Scripted, make_played
recording.SHARD = 700
def slow(game):
    def act(obs):
        if obs[1] == 9:
            Path("here").touch()
            time.sleep(60)
        return 0
    return act
envs, game = make_played("veldt/Counter-v0")
recording.record("d", envs, Scripted(slow, game, envs.spec), 20)
"""


def test_a_killed_recording_is_refused(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], cwd=tmp_path)
    try:
        for _ in range(6_000):
            if (tmp_path / "here").exists():
                break
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait(30)
    assert ".recording" in tree_of(tmp_path / "d") and "shard-00000.safetensors" in tree_of(tmp_path / "d")
    with pytest.raises(UserError, match="its recording was cut off"):
        Demos.open(tmp_path / "d")


def test_ctrl_c_keeps_the_whole_episodes(capsys: Captured, tmp_path: Path) -> None:
    """Episodes of one action are over before it is pressed; the first that is longer than that is looked for."""
    env = int(derive(0, "demonstrations", 0) % 2**31)
    long = [episode for episode in range(50) if Counter.length(env, episode, 12) > 1]
    interrupts.at = long[3]  # type: ignore[attr-defined]
    argv = ["record", "--policy", f"{ME}interrupts", "--env", COUNTER, "--episodes", "50", "-o", str(tmp_path / "d")]
    assert main(argv) == 130
    assert f"Stopped at {long[3]} of 50 episodes" in capsys.readouterr().out
    demos = Demos.open(tmp_path / "d")
    assert len(demos) == long[3] and demos.wanted == 50
    assert demos.lengths.tolist() == [Counter.length(env, episode, 12) for episode in range(long[3])]
    assert main(["demos", str(tmp_path / "d")]) == 0
    assert f"{long[3]} episodes of 50 wanted" in capsys.readouterr().out

    argv[-1] = str(tmp_path / "none")
    seed = next(s for s in range(50) if Counter.length(int(derive(s, "demonstrations", 0) % 2**31), 0, 12) > 1)
    interrupts.at = 0  # type: ignore[attr-defined]
    assert main([*argv, "--seed", str(seed)]) == 130
    assert "nothing was recorded" in capsys.readouterr().out and not (tmp_path / "none").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_keeps_the_whole_episodes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        recorded(tmp_path / "d", fails, episodes=9)
    assert len(Demos.open(tmp_path / "d")) == 3


@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    shards = len(recorded(tmp_path / "good", at_random).shards)
    (tmp_path / "d").mkdir()
    calls, real = [], os.rename

    def full(*args: Any) -> None:
        calls.append(args)
        if len(calls) - 1 == (at if at >= 0 else shards):  # the last one is the manifest's
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(UserError, match=r"cannot be written to .*No space left"):
        recorded(tmp_path / "d", at_random)
    assert not list((tmp_path / "d").iterdir()), "and a directory that was there stays"


def test_a_directory_in_use_is_not_touched(tmp_path: Path, counter: Demos) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shard-thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds something already; choose another directory"):
        recorded(tmp_path / "mine", at_random)
    with pytest.raises(UserError, match="holds a demonstration set already"):
        recorded(counter.path, at_random)
    with pytest.raises(UserError, match="cannot be written"):
        recorded(tmp_path / "mine" / "shard-thesis.txt", at_random)
    assert (tmp_path / "mine" / "shard-thesis.txt").read_text() == "mine" and len(Demos.open(counter.path)) == 12
    recording = Recording(tmp_path / "both", counter.columns)
    with pytest.raises(UserError, match="cut off already"):
        Recording(tmp_path / "both", counter.columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda path: iter(()))  # both looked before one of them took it
        with pytest.raises(UserError, match="File exists"):
            Recording(tmp_path / "both", counter.columns)
    recording.close({})
    assert not (tmp_path / "both").exists()


def copy(demos: Demos, path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(demos.path, path)
    return path


def sign(path: Path, change: Callable[[dict[str, Any]], Any], shards: bool = False) -> None:
    """Changes the manifest and makes its digests agree with all files, as an attacker would."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    change(manifest)
    if shards:
        for shard in manifest["shards"]:
            data = (path / shard["file"]).read_bytes()
            shard |= {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


def same(path: Path, demos: Demos) -> bool:
    return Demos.open(path).returns.tolist() == demos.returns.tolist()


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000.safetensors"])
def test_a_flipped_bit_or_a_missing_byte_is_found(tmp_path: Path, counter: Demos, name: str) -> None:
    path, rng = copy(counter, tmp_path / "d"), random.Random(0)
    data = (path / name).read_bytes()
    for at in [*range(40), *(rng.randrange(len(data)) for _ in range(120))]:
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        (path / name).write_bytes(flipped)
        with pytest.raises(UserError, match=r"d is not a readable demonstration set: .*(manifest\.json|shard-00000)"):
            Demos.open(path)
    for size in (0, 1, 7, 8, 9, len(data) // 2, len(data) - 3):
        (path / name).write_bytes(data[:size])
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            Demos.open(path)
    (path / name).write_bytes(data)
    assert same(path, counter)


def edit(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = to

    return change


LIES = [
    (edit("format", to="zip"), "not of the format"),
    (edit("version", to=2), "has version 2, this Veldt reads version 1"),
    (edit("version", to=10**4000), "has version"),
    (edit("env", to=3), "an invalid env"),
    (edit("seed", to=-1), "an invalid seed"),
    (edit("seed", to=True), "an invalid seed"),
    (edit("protocol", to="dqn"), "an invalid protocol"),
    (edit("episodes", to=[]), "no episodes"),
    (edit("shards", to=[]), "no episodes"),
    (edit("columns", to=[]), "an invalid columns"),
    (edit("columns", "obs", to=3), "an invalid column 'obs'"),
    (edit("columns", "obs", "dtype", to="object"), "an invalid column 'obs'"),
    (edit("columns", "obs", "dtype", to=["int64"]), "an invalid column 'obs'"),
    (edit("columns", "obs", "shape", to=[2**47, 2**47]), "too small for"),
    (edit("columns", "obs", "shape", to=[-4]), "an invalid column"),
    (edit("columns", "obs", "shape", to=[2, 2]), "shard-00000.safetensors does not have the columns, shapes and dtypes"),
    (edit("columns", "obs", "dtype", to="float64"), "shard-00000.safetensors does not have the columns, shapes and dtypes"),
    (edit("columns", "reward", "dtype", to="float64"), "does not have the columns of a step record"),
    (edit("columns", "extra", to={"shape": [], "dtype": "bool"}), "does not have the columns of a step record"),
    (lambda manifest: manifest["columns"].pop("last"), "does not have the columns of a step record"),
    (lambda manifest: manifest["columns"].pop("action"), "does not have the columns of a step record"),
    (edit("shards", 0, to="shard-00000.safetensors"), "does not name"),
    (edit("shards", 0, "file", to="../shard-00000.safetensors"), "does not name shard-00000"),
    (edit("shards", 0, "file", to="/etc/passwd"), "does not name shard-00000"),
    (edit("shards", 0, "rows", to=2**47), "too small for the"),
    (edit("shards", 0, "rows", to=10**30), "invalid numbers for shard-00000"),
    (edit("shards", 0, "rows", to=0), "invalid numbers for shard-00000"),
    (edit("shards", 0, "rows", to=1), "shard-00000.safetensors does not have the columns, shapes and dtypes"),
    (edit("shards", 0, "bytes", to=2**47), "shard-00000.safetensors has .* bytes instead of"),
    (edit("shards", 0, "bytes", to=1.5), "invalid numbers"),
    (edit("shards", 0, "sha256", to="0" * 64), "shard-00000.safetensors does not match its checksum"),
    (
        lambda manifest: manifest["shards"].append({**manifest["shards"][0], "file": "shard-00001.safetensors"}),
        "is missing",
    ),
    (edit("episodes", 0, to=None), "invalid numbers for episode 0"),
    (edit("episodes", 3, "start", to=0), "an episode 3 that does not follow"),
    (edit("episodes", 3, "return", to=math.nan), "rewards do not sum to"),
    (edit("episodes", 3, "return", to=1e9), "rewards do not sum to"),
    (edit("episodes", 3, "return", to="9"), "invalid numbers for episode 3"),
    (lambda manifest: manifest["episodes"].pop(), "but shards of"),
    (lambda manifest: manifest["episodes"].pop(0), "an episode 0 that does not follow"),
]


@pytest.mark.parametrize(("change", "says"), LIES, ids=[says for _, says in LIES])
def test_a_signed_lie_is_found(tmp_path: Path, counter: Demos, change: Any, says: str) -> None:
    path = copy(counter, tmp_path / "d")
    sign(path, change)
    with pytest.raises(UserError, match=says):
        Demos.open(path)


def test_the_ends_of_episodes_cannot_be_moved(tmp_path: Path, counter: Demos) -> None:
    """Two episodes told as one would be trained across."""
    path = copy(counter, tmp_path / "d")

    def join(manifest: dict[str, Any]) -> None:
        two = manifest["episodes"].pop(1)
        one = manifest["episodes"][0]
        one |= {"stop": two["stop"], "length": two["stop"] - 1, "return": one["return"] + two["return"]}

    sign(path, join)
    with pytest.raises(UserError, match="do not begin and end where its manifest says"):
        Demos.open(path)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("reward", np.nan, "rewards that are not finite"),
        ("discount", 0.5, "neither 0 nor 1"),
        ("last", True, "begin and end"),
    ],
)
def test_rows_that_lie_are_found(tmp_path: Path, counter: Demos, column: str, value: Any, says: str) -> None:
    path = copy(counter, tmp_path / "d")
    arrays = load_file(path / "shard-00000.safetensors")
    arrays[column][0] = value
    save_file(arrays, path / "shard-00000.safetensors")
    sign(path, lambda manifest: None, shards=True)
    with pytest.raises(UserError, match=says):
        Demos.open(path)


def test_observations_that_are_not_finite_are_never_given(tmp_path: Path) -> None:
    demos = recorded(tmp_path / "d", at_random, "veldt/Chain-v0", 1)
    arrays = load_file(tmp_path / "d" / "shard-00000.safetensors")
    arrays["obs"][1, 1] = np.inf
    save_file(arrays, tmp_path / "d" / "shard-00000.safetensors")
    sign(tmp_path / "d", lambda manifest: None, shards=True)
    with pytest.raises(UserError, match=r"shard-00000\.safetensors has values of obs that are not finite"):
        list(Demos.open(tmp_path / "d").episodes())
    (demos.path / "shard-00000.safetensors").unlink()
    with pytest.raises(UserError, match=r"shard-00000\.safetensors can no longer be read"):
        list(demos.episodes())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_whatever_a_manifest_says_it_is_one_sentence(tmp_path_factory: Any, counter: Demos, data: st.DataObject) -> None:
    """Any JSON in place of any part of it, signed."""
    path = copy(counter, tmp_path_factory.getbasetemp() / "fuzzed")

    def change(manifest: dict[str, Any]) -> None:
        at: Any = manifest
        while True:
            key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
                at[key] = data.draw(JSON)
                return
            at = at[key]

    sign(path, change)
    said = ""
    try:
        found = Demos.open(path)
        assert len(list(found.episodes())) == len(found)
    except UserError as error:
        said = str(error)
    assert not said or (str(path) in said and len(said.encode()) < 500)


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=60) | JSON.map(lambda x: json.dumps(x).encode()), st.booleans())
def test_whatever_a_file_holds_it_is_one_sentence(tmp_path_factory: Any, counter: Demos, data: bytes, header: bool) -> None:
    path = copy(counter, tmp_path_factory.getbasetemp() / "garbage")
    (path / "manifest.json").write_bytes(data)
    with pytest.raises(UserError, match=r"manifest\.json"):
        Demos.open(path)
    shutil.copy(counter.path / "manifest.json", path)
    shard = path / "shard-00000.safetensors"
    size = shard.stat().st_size
    garbage = len(data).to_bytes(8, "little") + data if header else data
    shard.write_bytes(garbage + bytes(max(0, size - len(garbage))))
    sign(path, lambda manifest: None, shards=True)
    with pytest.raises(UserError, match=r"shard-00000\.safetensors"):
        Demos.open(path)


def test_what_is_no_file_is_not_opened(tmp_path: Path, counter: Demos) -> None:
    for name in ("manifest.json", "shard-00000.safetensors"):
        path = copy(counter, tmp_path / "d")
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            Demos.open(path)
        (path / name).unlink()
        (path / name).mkdir()
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            Demos.open(path)
    path = copy(counter, tmp_path / "d")
    (path / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match=r"manifest\.json is not valid JSON"):
        Demos.open(path)
    with open(path / "manifest.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(UserError, match="more than the"):
        Demos.open(path)


def test_another_environment_is_refused(tmp_path: Path, counter: Demos, caplog: pytest.LogCaptureFixture) -> None:
    counter.check(make_env(COUNTER).spec)
    assert not caplog.records
    for env, says in (
        (
            "CartPole-v1",
            r"do not fit CartPole-v1: obs is \[4\] int64 there and \[4\] float32 here; .* from veldt/Counter-v0",
        ),
        ("veldt/Catch-v0", r"obs is \[4\] int64 there and \[10, 5\] uint8 here"),
        ("ALE/Pong-v5", "do not fit ALE/Pong-v5"),
    ):
        with pytest.raises(UserError, match=says):
            counter.check(make_env(env).spec)
    with pytest.raises(UserError, match="obs/a is missing there"):
        counter.check(make_env(lambda: Game(spaces.Discrete(3), DICT)).spec)
    two = recorded(tmp_path / "chain", at_random, "veldt/Chain-v0", 1)
    more = make_env(lambda: Game(spaces.Discrete(5), spaces.Box(0, 1, (8,), np.float32))).spec
    with pytest.raises(UserError, match=r"action space is Discrete\(2\), but that of the environment is Discrete\(5\)"):
        two.check(more)
    two.check(make_env(lambda: Game(spaces.Discrete(2), spaces.Box(0, 1, (8,), np.float32))).spec)
    assert "were recorded from veldt/Chain-v0, not from" in caplog.text


def test_an_action_that_does_not_exist_is_refused(tmp_path: Path, counter: Demos) -> None:
    """It would be looked up beyond the end of what a network gives."""
    path = copy(counter, tmp_path / "d")
    arrays = load_file(path / "shard-00000.safetensors")
    arrays["action"][0] = 3
    save_file(arrays, path / "shard-00000.safetensors")
    sign(path, lambda manifest: None, shards=True)
    with pytest.raises(UserError, match=r"have actions that are not in Discrete\(3\)"):
        Demos.open(path).check(make_env(COUNTER).spec)


# The commands.


def test_record_and_demos(capsys: Captured, tmp_path: Path) -> None:
    argv = ["--policy", f"{ME}catch", "--env", "veldt/Catch-v0", "--episodes", "7", "-o", str(tmp_path / "a" / "d")]
    assert main(["record", *argv]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a' / 'd'}: 7 episodes, 63 steps, mean return 1.0\n"
    assert main(["demos", str(tmp_path / "a" / "d"), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    numbers = json.loads(lines[-1])
    assert (numbers["env"], numbers["episodes"], numbers["steps"]) == ("veldt/Catch-v0", 7, 63)
    assert numbers["returns"] == [1.0] * 7 and numbers["lengths"] == [9] * 7 and numbers["policy"] == f"{ME}catch"
    assert lines[0].startswith(f"{tmp_path / 'a' / 'd'}: 7 episodes, 63 steps, ")
    assert lines[1] == "environment: veldt/Catch-v0: obs [10, 5] uint8; actions Discrete(3)"
    assert lines[3:5] == [
        "returns: mean 1.0, min 1.0, max 1.0, sd 0.0",
        "lengths: mean 9.0, min 9.0, max 9.0, sd 0.0",
    ]
    assert lines[6].split() == ["1", "#" * 40, "7"]
    argv[-1] = str(tmp_path / "b")
    assert main(["record", *argv, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    a, b = (Demos.open(path) for path in (tmp_path / "a" / "d", tmp_path / "b"))
    assert [shard.sha256 for shard in a.shards] == [shard.sha256 for shard in b.shards], "a seed is a seed"
    assert main(["record", *argv[:-1], str(tmp_path / "c"), "--seed", "1", "--quiet"]) == 0
    assert Demos.open(tmp_path / "c").shards[0].sha256 != a.shards[0].sha256


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(-1e30, 1e30) | st.integers(0, 20).map(float), min_size=1, max_size=30))
def test_a_histogram_counts_all_and_each_where_it_belongs(returns: list[float]) -> None:
    lines = histogram(np.array(returns))
    counts = [int(line.split()[-1].replace(",", "")) for line in lines]
    bars = [line.count("#") for line in lines]
    assert sum(counts) == len(returns) and len(counts) == (10 if max(returns) > min(returns) else 1)
    assert max(bars) == 40 and all((bar > 0) == (count > 0) for bar, count in zip(bars, counts, strict=True))
    assert all(a <= b for (a, ca), (b, cb) in pairwise(sorted(zip(bars, counts, strict=True))) if ca <= cb)
    assert counts[-1] >= 1 and counts[0] >= 1


def test_a_histogram_by_hand() -> None:
    lines = histogram(np.array([0.0, 1.0, 1.5, 2.0, 10.0]))
    assert [int(line.split()[-1]) for line in lines] == [1, 2, 1, 0, 0, 0, 0, 0, 0, 1]
    assert lines[1].split() == ["1", "to", "2", "#" * 40, "2"]


def test_a_run_plays_greedily(capsys: Captured, tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", "veldt/Catch-v0", steps=300, **{"eval.every": 0, "checkpoint.every": 0})
    argv = ["record", "--policy", str(run.path), "--episodes", "6", "-o"]
    assert main([*argv, str(tmp_path / "d"), "--quiet"]) == 0
    demos, policy = Demos.open(tmp_path / "d"), run.policy(0.0)
    demos.check(run.config.envs().spec)
    for episode in demos.episodes():
        for t in range(len(episode["first"]) - 1):
            policy.send(0, {name: x[t : t + 1] for name, x in episode.items()})
            out = policy.recv(0)
            assert out is not None and out["action"][0] == episode["action"][t]
    taken = {}
    for name, seed in (("x", "1"), ("y", "1"), ("z", "2")):
        assert main([*argv, str(tmp_path / name), "--epsilon", "1", "--seed", seed, "--quiet"]) == 0
        taken[name] = np.concatenate([e["action"] for e in Demos.open(tmp_path / name).episodes()]).tolist()
    assert taken["x"] == taken["y"] != taken["z"] and set(taken["x"]) == {0, 1, 2}
    out = tmp_path / "o"
    assert f"CartPole-v1 does not fit {run.path}: its" in refused(capsys, *argv, out, "--env", "CartPole-v1")
    assert "epsilon is a probability" in refused(capsys, *argv, out, "--epsilon", "2")
    shutil.rmtree(run.path / "checkpoints")
    assert "has no checkpoint yet" in refused(capsys, *argv, out)
    assert not out.exists()


EXPERT = ["record", "--policy", f"{ME}catch", "-o", "d"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["record", "--policy", "nothing", "-o", "d"], "'nothing' is neither the directory of a run nor module:callable"),
        (["record", "--policy", ".", "-o", "d"], ". is not a run directory: it has no config.yaml"),
        (["record", "--policy", "nothing_here:make", "-o", "d"], "nothing_here cannot be imported"),
        (["record", "--policy", f"{ME}nobody", "-o", "d"], "is not callable"),
        (EXPERT, "Give the environment to play"),
        ([*EXPERT, "--env", "Cach-v0"], "There is no environment 'Cach-v0'"),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--episodes", "0"], "episodes must be greater than 0"),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--max-length", "0"], "max_length must be greater than 0"),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--seed", "-1"], "seed must not be negative"),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--min-return", "nan"], "min_return must be a number"),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--epsilon", "0.1"], "--epsilon is for the policy of a run"),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--protocol", "dqn"], "protocol 'dqn' is for Atari"),
        (
            ["record", "--policy", f"{ME}wrong", "--env", COUNTER, "-o", "d"],
            "returned the action 7, which is not in Discrete(3)",
        ),
        (
            ["record", "--policy", f"{ME}no_expert", "--env", COUNTER, "-o", "d"],
            "must return a function from an observation",
        ),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--min-return", "2", "--episodes", "1"], "Only 0 of 20 episodes returned 2"),
        (["demos", "d"], "d is not a readable demonstration set: there is no such directory"),
        (["demos", "."], ". is not a readable demonstration set: it has no manifest.json, veldt record makes one"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_input_is_one_sentence(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *argv)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["record"], "--policy"),
        (["record", "--policy", "x:y"], "-o"),
        ([*EXPERT, "--env", "veldt/Catch-v0", "--episode", "1"], "--episodes INT"),
        (["demos"], "PATH"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_flags_that_are_wrong_or_missing_are_named(capsys: Captured, argv: list[str], says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert says in capsys.readouterr().err


def test_describing_a_set_needs_no_torch(counter: Demos) -> None:
    code = f"import sys; from veldt.__main__ import main; code = main(['demos', {str(counter.path)!r}]); "
    code += "sys.exit(code or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_no_escape_code_of_a_set_reaches_the_terminal(
    counter: Demos, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(counter.path, tmp_path / "sent"))
    sign(path, lambda manifest: manifest.update(env="\x1b]0;mine\x07", policy="\x1b[2J"))
    assert main(["demos", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "]0;mine" in shown and "[2J" in shown and "\x1b" not in shown and "\x07" not in shown
