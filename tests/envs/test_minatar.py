"""MinAtar from its package: the same games, records that follow the contract, and a network that takes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from minatar import Environment
from PIL import Image

from veldt.envs import make_env
from veldt.experiment import recipes
from veldt.experiment.run import record_video, train
from veldt.nets.torsos import MinAtarCNN

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


@pytest.mark.parametrize("game", GAMES)
def test_records_are_those_of_the_game_itself(game: str) -> None:
    """All six actions, the stickiness and the ramping difficulty that the paper has; states, rewards and ends agree."""
    envs = make_env(f"MinAtar/{game.title().replace('_', '')}-v0", 1)
    record, rng = envs.reset(5), np.random.default_rng(0)
    assert envs.spec.n_actions == 6 and record["obs"].dtype == np.bool_
    theirs = Environment(game)
    theirs.seed(5)
    theirs.reset()
    assert theirs.sticky_action_prob == 0.1
    episodes = 0
    for _ in range(1_500):
        assert (record["obs"][0] == theirs.state()).all()
        action = int(rng.integers(6))
        before, record = record, envs.step(np.array([action]))
        if before["last"][0]:
            theirs.reset()
            assert record["first"][0] and record["reward"][0] == 0
            episodes += 1
            continue
        reward, ended = theirs.act(action)
        assert record["reward"][0] == reward
        assert record["last"][0] == ended and record["discount"][0] == 1 - ended
    assert episodes or game == "freeway"


def test_no_warning_is_shown_for_the_version_with_all_actions(recwarn: pytest.WarningsRecorder) -> None:
    assert make_env("MinAtar/Breakout-v0", 2).spec.n_actions == 6
    assert make_env("MinAtar/Breakout-v1", 2).spec.n_actions == 3
    assert not recwarn.list


def test_the_recipe_trains_a_network_made_for_it_and_its_games_can_be_watched(tmp_path: Path) -> None:
    config = recipes.make("dqn", "MinAtar/SpaceInvaders-v0")
    algorithm = config.algorithm
    assert algorithm.double and algorithm.dueling and algorithm.n > 1 and config.store.selector == "prioritized"
    assert isinstance(algorithm.network(config.envs().spec).torso, MinAtarCNN)
    small = {"store.capacity": "2_000", "store.min_size": 200, "eval.every": 0}
    run = train(config, run=tmp_path / "r", quiet=True, steps=400, **small)
    assert run.metrics[-1]["learner_steps"] > 10
    assert record_video(run, tmp_path / "x.gif", max_frames=5) == 5
    with Image.open(tmp_path / "x.gif") as image:
        assert image.size == (320, 320), "enlarged"
        colours = image.convert("RGB").getcolors()
        assert colours is not None and len(colours) >= 3


def test_a_seeded_reset_forgets_all_that_was_before() -> None:
    """A resumed run seeds fresh games, the uninterrupted one games that were played: no difference may be seen."""
    played, fresh = make_env("MinAtar/Breakout-v0", 4), make_env("MinAtar/Breakout-v0", 4)
    rng = np.random.default_rng(0)
    for seed in range(20):
        played.reset(1000 + seed)
        for _ in range(5):
            played.step(np.full(4, 3))
        a, b = played.reset(seed), fresh.reset(seed)
        for _ in range(6):
            assert (a["obs"] == b["obs"]).all()
            action = rng.integers(0, 6, 4)
            a, b = played.step(action), fresh.step(action)
        fresh = make_env("MinAtar/Breakout-v0", 4)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, seed: int) -> None:
    settings = {"store.capacity": "1_000", "store.min_size": 200, "eval.every": 0, "checkpoint.every": 400, "seed": seed}
    env = "MinAtar/Breakout-v0"
    straight = train("dqn", env=env, run=tmp_path / "a", quiet=True, steps=1_600, **settings, **{"learner.anneal": False})
    train("dqn", env=env, run=tmp_path / "b", quiet=True, steps=800, **settings, **{"learner.anneal": False})
    resumed = train("dqn", env=env, run=tmp_path / "b", quiet=True, steps=1_600, **settings, **{"learner.anneal": False})
    assert resumed.weights_hash() == straight.weights_hash()
