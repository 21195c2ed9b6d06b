"""Atari: our records against Gymnasium's own preprocessing and frame stacking, and the papers' protocols."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import ale_py  # noqa: F401  registers its environments
import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from PIL import Image

from veldt.__main__ import main
from veldt.envs import Envs, make_env
from veldt.envs.atari import PROTOCOLS, Atari, Protocol, find_protocol
from veldt.errors import UserError
from veldt.experiment import settings
from veldt.experiment.recipes import make
from veldt.experiment.run import record_video, resume, train
from veldt.records.history import stack_history

STEPS = 2_000


class Count:
    """A random generator that draws what it is told."""

    def integers(self, low, high):
        return self.value


class Reference:
    """Gymnasium's AtariPreprocessing and FrameStackObservation over the same emulator with the same seed."""

    def __init__(self, env: str, protocol: Protocol) -> None:
        game = gym.make(
            env,
            frameskip=1,
            repeat_action_probability=protocol.sticky,
            full_action_space=protocol.full_actions,
            max_num_frames_per_episode=protocol.max_frames,
        )
        self.emulator = game.unwrapped
        self.wrapped = AtariPreprocessing(
            game, noop_max=max(1, protocol.noops), frame_skip=protocol.frame_skip, screen_size=84
        )
        self.env = FrameStackObservation(self.wrapped, 4, padding_type="zero")
        self.noops = Count()

    def begin(self, noops: int, seed: int | None = None) -> None:
        """Begins an episode with so many no-ops, as our environment did."""
        if seed is not None:  # Gymnasium derives the emulator's seed from its own; ours is the emulator's
            self.emulator.ale.setInt("random_seed", seed)
            self.emulator.load_game()
        self.noops.value = noops
        self.emulator._np_random = self.noops
        self.stack, info = self.env.reset()
        self.lives, self.reward, self.terminated, self.truncated = info["lives"], 0.0, False, False
        self.life_lost = False

    def step(self, action: int) -> None:
        self.stack, self.reward, self.terminated, self.truncated, info = self.env.step(action)
        self.life_lost, self.lives = info["lives"] < self.lives, info["lives"]


def compare(env: str, protocol: Protocol, steps: int, seed: int = 7) -> dict[str, int]:
    """Steps ours and the reference with the same actions, and asserts that everything agrees. Returns what it saw."""
    n = 2
    atari = Atari(env, n, protocol)
    ours, theirs = Envs(atari, env), [Reference(env, protocol) for _ in range(n)]
    rng, seen = np.random.default_rng(seed), {"episodes": 0, "lives": 0, "truncated": 0, "rewards": 0}
    record = ours.reset(seed)
    for lane, reference in enumerate(theirs):
        reference.begin(int(atari.info["episode_frame_number"][lane]), seed + lane)
    rows = {name: record[name][:, None].repeat(4, 1) for name in ("obs", "first", "valid")}
    for t in range(steps + 1):
        for name, row in rows.items():
            rows[name] = np.concatenate([row[:, 1:], record[name][:, None]], 1)
        stacks = stack_history(rows["obs"], rows["first"], rows["valid"], 3, 4)
        for lane, reference in enumerate(theirs):
            where = (env, t, lane)
            assert record["obs"].dtype == np.uint8
            assert (record["obs"][lane] == reference.stack[-1]).all(), where
            assert (stacks[lane] == reference.stack).all(), where
            assert record["reward"][lane] == reference.reward, where
            ended = reference.terminated or (reference.life_lost and protocol.life_loss)
            assert record["discount"][lane] == 1.0 - ended, where
            assert record["last"][lane] == (reference.terminated or reference.truncated), where
            assert record["valid"][lane]
            seen["rewards"] += reference.reward != 0
            seen["lives"] += reference.life_lost and not reference.terminated
            seen["truncated"] += reference.truncated
            seen["episodes"] += bool(record["first"][lane])
        action = rng.integers(0, ours.spec.n_actions, n)
        last, record = record["last"], ours.step(action)
        assert (record["first"] == last).all()
        for lane, reference in enumerate(theirs):
            if last[lane]:
                reference.begin(int(atari.info["episode_frame_number"][lane]))
            else:
                reference.step(int(action[lane]))
    return seen


@pytest.mark.parametrize("game", ["Breakout", "Pong", "SpaceInvaders"])
def test_records_equal_gymnasiums_preprocessing_and_stacking(game):
    seen = compare(f"ALE/{game}-v5", PROTOCOLS["dqn"], STEPS)
    print(game, seen)
    assert seen["rewards"] > 20 and seen["episodes"] > 2
    assert game == "Pong" or seen["lives"] > 10


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_equals_gymnasiums_with_the_same_settings(name):
    """Sticky actions too: both ask the emulator, which draws from the seed."""
    seen = compare("ALE/Breakout-v5", PROTOCOLS[name], 400)
    assert seen["lives"] > 5 and seen["episodes"] > 2


@pytest.mark.parametrize("frames", [400, 401, 403])
def test_a_capped_episode_is_truncated_where_gymnasium_truncates(frames):
    """Without no-ops: Gymnasium counts those as frames of the episode, and ale-py does not (at most 30 of 108,000)."""
    seen = compare("ALE/Pong-v5", Protocol(noops=0, max_frames=frames), 350)
    assert seen["truncated"] == 2 * (350 // 101), seen


def test_the_papers_settings():
    assert {name: dataclasses.astuple(p) for name, p in PROTOCOLS.items()} == {
        # no-ops, sticky, life loss, 18 actions, frames, skip
        "dqn": (30, 0.0, True, False, 108_000, 4),
        "apex": (30, 0.0, True, True, 108_000, 4),
        "r2d2": (30, 0.0, False, True, 108_000, 4),
        "machado": (0, 0.25, False, True, 18_000, 5),
        "dopamine": (0, 0.25, False, False, 108_000, 4),
    }
    assert [make_env("ALE/Breakout-v5", protocol=name).spec.n_actions for name in PROTOCOLS] == [4, 18, 18, 18, 4]


def test_a_protocol_may_have_the_games_own_actions_or_all_18():
    def actions(protocol):
        return make_env("ALE/Pong-v5", protocol=protocol).spec.n_actions

    names = ("dqn", "dqn:full", "apex", "apex:minimal", "r2d2", "r2d2:minimal")
    assert [actions(name) for name in names] == [6, 18, 18, 6, 18, 6]
    for name, paper in PROTOCOLS.items():
        assert find_protocol(f"{name}:minimal") == dataclasses.replace(paper, full_actions=False), "nothing else changes"


def test_no_op_starts_are_spread_over_0_to_30():
    envs, frames = make_env("ALE/Pong-v5", 10), set()
    for seed in range(0, 60, 10):
        envs.reset(seed)
        frames |= set(envs.env.info["episode_frame_number"].tolist())
    assert min(frames) <= 2 and 28 <= max(frames) <= 30 and len(frames) > 18


@pytest.mark.parametrize("name", PROTOCOLS)
def test_no_op_starts_are_random_where_the_protocol_has_them(name):
    envs = make_env("ALE/Pong-v5", 8, protocol=name)
    envs.reset(0)
    frames = set(envs.env.info["episode_frame_number"].tolist())
    assert len(frames) > 3 if PROTOCOLS[name].noops else frames == {0}


def test_a_lost_life_ends_the_return_and_not_the_episode():
    ended = {}
    for name in ("dqn", "r2d2"):
        envs = make_env("ALE/Breakout-v5", 1, protocol=name)
        record, rng = envs.reset(3), np.random.default_rng(0)
        ended[name] = ends = []
        while not record["last"][0]:
            record = envs.step(rng.integers(0, 4, 1))
            ends.append((float(record["discount"][0]), bool(record["last"][0])))
        assert ends[-1] == (0.0, True)
    lost = [end for end in ended["dqn"][:-1] if end[0] == 0.0]
    assert lost == [(0.0, False)] * 4, "five lives, the last of which is the episode's"
    assert all(end == (1.0, False) for end in ended["r2d2"][:-1])


def test_the_screens_of_a_video_are_those_of_the_game_that_is_played():
    """The coloured screens, shrunk by the emulator, are the frames that the policy sees."""
    import cv2

    envs, rng = make_env("ALE/Pong-v5", 1, render=True, protocol="machado"), np.random.default_rng(0)
    record, before, differs = envs.reset(5), 0, False
    for _ in range(300):
        (screen,) = envs.env.render()
        assert screen.shape == (210, 160, 3) and screen.dtype == np.uint8
        grey = cv2.cvtColor(screen, cv2.COLOR_RGB2GRAY)
        small = cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA).astype(int)
        # The grey of two screens' maximum is not the maximum of their greys, but differs from it in few places only.
        off = np.abs(small - record["obs"][0]) > 3
        assert off.mean() < 0.005
        differs |= (np.abs(small - before) > 3).mean() > 0.01
        before, record = record["obs"][0], envs.step(rng.integers(0, 18, 1))
    assert differs, "the test can tell one frame from the next"
    assert make_env("ALE/Pong-v5", 1).env.render() is None


def test_same_seed_same_games_and_records_that_later_steps_do_not_change():
    def play(seed):
        envs, rng = make_env("ALE/Breakout-v5", 3), np.random.default_rng(1)
        records = [envs.reset(seed)]
        copies = [{name: x.copy() for name, x in records[0].items()}]
        for _ in range(60):
            records.append(envs.step(rng.integers(0, 4, 3)))
            copies.append({name: x.copy() for name, x in records[-1].items()})
        for record, copy in zip(records, copies, strict=True):
            assert all((record[name] == copy[name]).all() for name in copy), "the emulator wrote into an old record"
        return np.stack([copy["obs"] for copy in copies])

    assert (play(11) == play(11)).all()
    assert (play(11) != play(12)).any()


def test_errors_say_what_to_do():
    with pytest.raises(UserError, match=r"no Atari protocol 'machada'.*machado"):
        make_env("ALE/Pong-v5", protocol="machada")
    with pytest.raises(UserError, match=r"no actions 'minimum'; use apex:minimal .* or apex:full"):
        make_env("ALE/Pong-v5", protocol="apex:minimum")
    with pytest.raises(UserError, match=r"'sticky' .* is gone; use machado \(.*\) or dopamine"):
        make_env("ALE/Pong-v5", protocol="sticky")
    with pytest.raises(UserError, match=r"protocol 'dqn' is for Atari"):
        settings.check(make("dqn", "CartPole-v1", protocol="dqn"))
    with pytest.raises(UserError, match=r"no environment 'ALE/Pongg-v5'.*ALE/Pong-v5"):
        make_env("ALE/Pongg-v5")
    with pytest.raises(UserError, match=r"PongNoFrameskip-v4 .*ALE/Pong-v5"):
        make_env("PongNoFrameskip-v4")


def test_a_run_picks_its_settings_says_them_and_can_be_watched(tmp_path, capsys):
    small = {"store.capacity": "2_000", "store.min_size": 300, "envs_per_actor": 2, "eval.every": 0, "threads": 1}
    run = train("dqn", env="ALE/Breakout-v5", run=tmp_path / "r", steps=400, **small)
    said = capsys.readouterr().out
    for part in (
        "obs [84, 84] uint8",
        "NatureCNN, 1,686,180 parameters",
        "stacks 4 of obs",
        "clip_reward 1.0",
        "protocol dqn: noops 30, sticky 0.0, life_loss",
        "2,000 items of 7.5 KB, 15.4 MB when full",
        "0.25 updates of 32 per env step",
    ):
        assert part in said, (part, said)
    last = run.metrics[-1]
    assert last["learner_steps"] > 5 and last["memory_bytes"] > 10**8
    assert {"busy/actor", "busy/learner"} <= set(last)
    assert record_video(run, tmp_path / "x.gif", max_frames=5) == 5
    with Image.open(tmp_path / "x.gif") as image:
        assert image.size == (320, 420), "enlarged"
    assert len(run.evaluate(2, epsilon=1.0).returns) == 2


def test_evaluation_and_resume_have_the_actions_of_the_run(tmp_path, capsys):
    small = {"store.capacity": "1_000", "store.min_size": 300, "envs_per_actor": 2, "eval.every": 0, "eval.max_length": 9}
    train("dqn", env="ALE/Pong-v5", run=tmp_path / "r", steps=40, protocol="r2d2:minimal", quiet=True, **small)
    with pytest.raises(UserError, match="protocol is r2d2:minimal there and r2d2 here"):
        resume(tmp_path / "r", protocol="r2d2")
    run = resume(tmp_path / "r", steps=80)
    said = capsys.readouterr().out
    assert "actions Discrete(6)" in said and "protocol r2d2:minimal: noops 30, sticky 0.0, max_frames" in said, said
    assert run.metrics[-1]["env_steps"] == 80 and run.checkpoints().weights()["head.advantage.weight"].shape[0] == 6
    assert main(["eval", str(run.path), "--episodes", "1", "--epsilon", "1"]) == 0


def test_reported_returns_are_raw_and_the_store_keeps_raw_rewards():
    """Pong's rewards are -1 and 1; those of Q*bert are 25 and more."""
    envs, rng = make_env("ALE/Qbert-v5", 4), np.random.default_rng(0)
    envs.reset(0)
    rewards = np.concatenate([envs.step(rng.integers(0, 6, 4))["reward"] for _ in range(300)])
    assert rewards.max() >= 25 and rewards.dtype == np.float32


def test_any_seed_will_do():
    for seed in (0, 2**31 - 1, 2**31, 2**63 - 1):
        make_env("ALE/Pong-v5", 3).reset(seed)


def test_old_names_are_answered_in_a_fresh_process(tmp_path):
    code = "from veldt.__main__ import main; raise SystemExit(main(['train', 'dqn', '--env', 'PongNoFrameskip-v4']))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert out.returncode != 0 and "use ALE/Pong-v5" in out.stderr, out
