"""Videos of greedy episodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from test_run import tiny

import veldt
from veldt.envs.small import Chain
from veldt.errors import UserError
from veldt.experiment.run import Run, check_video, record_video


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("video") / "r", steps=300, **{"eval.every": 0})


def test_a_gif_has_the_frames_of_one_episode(run: Run, tmp_path: Path) -> None:
    frames = record_video(run, tmp_path / "x.gif")
    with Image.open(tmp_path / "x.gif") as image:
        assert image.format == "GIF"
        assert abs(image.n_frames - frames / 2) <= 1  # 50 frames a second are shown as 25
        assert image.size == (600, 400)
        colours = image.convert("RGB").getcolors(maxcolors=100_000)
        assert colours is not None and len(colours) > 2, "there is something to see"


def test_an_mp4_is_written(run: Run, tmp_path: Path) -> None:
    assert record_video(run, tmp_path / "x.mp4", max_frames=20) > 0
    data = (tmp_path / "x.mp4").read_bytes()
    assert data[4:8] == b"ftyp" and len(data) > 1_000


def test_a_long_episode_is_cut(run: Run, tmp_path: Path) -> None:
    assert record_video(run, tmp_path / "x.gif", max_frames=5) == 5


@pytest.mark.parametrize(("name", "says"), [("x.avi", "a .gif or an .mp4 file"), ("no/x.gif", "does not exist")])
def test_what_cannot_be_written_is_refused_before_anything_is_played(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_video(tmp_path / name)


def test_an_environment_without_pictures_is_named(tmp_path: Path) -> None:
    run = tiny(tmp_path / "r", env="veldt/Chain-v0", steps=60)
    with pytest.raises(UserError, match=r"veldt/Chain-v0 .*rgb_array"):
        record_video(run, tmp_path / "x.gif")
    run = tiny(tmp_path / "q", env=Chain, steps=60)
    with pytest.raises(UserError, match=r"Chain cannot be rendered"):
        record_video(run, tmp_path / "x.gif")
    assert not (tmp_path / "x.gif").exists()


def test_without_pygame_the_error_says_what_to_install(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(UserError, match=r"cannot be rendered \(pygame is not installed\): .*'veldt\[video\]'\.$"):
        record_video(run, tmp_path / "x.gif")


def test_a_small_game_is_large_and_slow_enough_to_follow(tmp_path: Path) -> None:
    pytest.importorskip("minatar")
    few = {"steps": 60, "eval.every": 0, "store.min_size": 50}
    run = veldt.train("dqn", env="MinAtar/Breakout-v1", run=tmp_path / "r", quiet=True, **few)
    frames = record_video(run, tmp_path / "x.gif", max_frames=30)
    with Image.open(tmp_path / "x.gif") as image:
        assert image.size == (320, 320) and image.info["duration"] >= 100, "10 frames a second"
        seconds = 0.0
        for i in range(image.n_frames):
            image.seek(i)
            seconds += image.info["duration"] / 1000
    assert seconds == pytest.approx(frames / 10, rel=0.05)


def test_a_video_has_the_random_actions_that_it_is_asked_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    policy = Run.policy

    def ask(self: Run, epsilon: float | None = None, *more: Any) -> Any:
        asked.append(epsilon)
        return policy(self, epsilon, *more)

    monkeypatch.setattr(Run, "policy", ask)
    record_video(run, tmp_path / "x.gif", max_frames=2, epsilon=0.3)
    assert asked == [0.3] and run.policy(0.3).explore == 0.3 and run.policy().explore == run.config.eval.epsilon
