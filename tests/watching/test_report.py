"""The results page: every run that was given, scores with intervals, and what each run took."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import pytest
import yaml
from PIL import Image
from test_plot import written

from veldt.cli import report as command
from veldt.errors import UserError
from veldt.watching.page import Section, Table, markdown, web
from veldt.watching.report import count, last_error
from veldt.watching.scores import Reference, add, atari57, estimates, game_of, interquartile_mean

PONG, BREAKOUT = "ALE/Pong-v5", "ALE/Breakout-v5"
TOOK = {
    "store_items": 1_000,
    "store_bytes": 7_750_000,
    "replay_ratio": 6.5,
    "cores": 16,
    "processor": "A Processor",
    "gpus": "NVIDIA H200",
}


def trained(path: Path, env: str, seed: int, score: float, done: int = 1_000, **more: Any) -> Path:
    """A run of 1,000 env steps: 100 updates of 32, ten seconds."""
    lines: list[dict[str, Any]] = [
        {"env_steps": done // 2, "eval_return": 900.0, "learner_steps": 50, "lag_updates": 3.0, "time_s": 5.0},
        {"env_steps": done, "eval_return": score, "learner_steps": 100, "lag_updates": 5.0, "time_s": 10.0, **TOOK, **more},
    ]
    return written(path, lines, seed=seed, **{"env": env, "steps": 1_000, "learner.batch": 32})


class Page(NamedTuple):
    folder: Path
    text: str  # Markdown
    scores: list[dict[str, str]]  # the rows of these tables
    runs: list[dict[str, str]]


def made(out: Path, runs: list[Path], *flags: str) -> Page:
    assert command.run([*map(str, runs), "-o", str(out), *flags]) == 0
    text = out.with_suffix(".md").read_text()
    return Page(out.parent, text, rows(text, "Scores"), rows(text, "Runs"))


def rows(text: str, title: str) -> list[dict[str, str]]:
    (table,) = re.findall(rf"## {title}\n\n((?:\|.*\n)+)", text)
    head, _, *body = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines())
    return [dict(zip(head, cells, strict=True)) for cells in body]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Of two seeds of Pong, one of Breakout that was stopped, and one of Pong that failed before its first evaluation."""
    folder = tmp_path_factory.mktemp("report")
    settings = {"env": PONG, "steps": 1_000, "learner.batch": 32}
    failed = written(folder / "failed", [{"env_steps": 200}], seed=3, **settings)
    (failed / "log.txt").write_text(
        "2026-01-01 10:00:00,000 INFO dqn on ALE/Pong-v5, seed 3, store 1 MB\n"
        "2026-01-01 10:00:05,000 INFO stopped by an error\nTraceback (most recent call last):\n"
        '  File "x.py", line 1\nveldt.errors.Diverged: the loss | is <not> finite\nSee runs/failed/log.txt\n'
    )
    pong = [trained(folder / f"pong-{seed}", PONG, seed, score) for seed, score in ((1, 20.0), (2, 10.0))]
    return made(
        folder / "page.html", [*pong, trained(folder / "breakout", BREAKOUT, 1, 30.5, done=700), failed], "--published"
    )


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, list[Any]]]:
    """The curves that would be drawn, an image after the other."""
    drawn: list[dict[str, list[Any]]] = []
    monkeypatch.setattr("veldt.watching.report.draw", lambda groups, out, steps: (drawn.append(groups), out.touch()))
    return drawn


def test_a_page_has_scores_and_what_they_took(page: Page) -> None:
    breakout, pong = page.scores
    assert pong["environment"] == "ALE/Pong-v5 dqn" and pong["method"] == "dqn"
    assert (pong["runs"], pong["frames"]) == ("2 of 3 (1 unfinished)", "4,000")
    assert pong["return \\[95 %\\]"] == "15 \\[10, 20\\]" and pong["lowest to highest"] == "10 to 20"
    assert pong["normalised"] == "101 %", "(15 + 20.7) / (14.6 + 20.7)"
    assert breakout["normalised"] == "100 %" and breakout["runs"] == "1 (1 unfinished)"
    first = next(row for row in page.runs if row["run"].endswith("pong-1"))
    assert (first["seed"], first["return"], first["normalised"], first["frames"]) == ("1", "20", "115 %", "4,000")
    assert (first["updates"], first["wall time"], first["frames/s"], first["samples/s"]) == ("100", "0:10", "400", "320")
    assert (first["replay ratio"], first["lag (updates)"], first["bytes/item"]) == ("6.5", "4", "7,750")
    assert first["state"] == "finished" and first["hardware"] == "A"
    assert "- A: A Processor, 16 cores; NVIDIA H200\n" in page.text


def test_every_run_is_listed_and_counted(page: Page) -> None:
    states = {Path(row["run"]).name: row["state"] for row in page.runs}
    assert states.keys() == {"pong-1", "pong-2", "breakout", "failed"}
    assert states["breakout"] == "stopped at 700 of 1,000 env steps"
    error = "veldt.errors.Diverged: the loss \\| is \\<not\\> finite; no evaluation"
    assert states["failed"] == f"failed at 200 of 1,000 env steps: {error}"
    assert "4 runs, all that were given; 2 finished." in page.text
    assert f"Without an evaluation, and so without a score: {page.folder / 'failed'}." in page.text


def test_statistics_over_games_are_beside_published_ones_of_the_same_games(page: Page) -> None:
    breakout, pong = page.scores
    assert (pong["DQN"], pong["IMPALA"], breakout["Ape-X"]) == ("18.9", "21", "801")
    ours, dqn, *_ = rows(page.text, "Over games")
    assert (ours["method"], ours["games"], ours["runs"]) == ("dqn", "2", "3")
    assert ours["mean"] == "101 % \\[93 %, 108 %\\]", "of Pong 87 to 115 %, and of Breakout 100 %"
    assert (dqn["method"], dqn["games"], dqn["mean"]) == ("DQN (published)", "2", "750 %")
    assert "200 M frames" in page.text and "22.8 G frames" in page.text


def test_a_page_is_markdown_html_and_an_image_for_each_environment(page: Page) -> None:
    found = {path.name for path in page.folder.glob("page*")}
    assert found == {"page.md", "page.html", "page-Pong.png", "page-Breakout.png"}
    with Image.open(page.folder / "page-Pong.png") as image:
        assert image.format == "PNG" and image.width > 1_000
    html = (page.folder / "page.html").read_text()
    assert html.count('src="data:image/png;base64,') == 2 and "<not>" not in html and "&lt;not&gt;" in html
    assert html.count("<tr>") == 1 + 2 + 1 + 6 + 1 + 4


@pytest.mark.usefixtures("undrawn")
def test_other_environments_are_normalised_only_by_given_scores(tmp_path: Path) -> None:
    runs = [trained(tmp_path / str(seed), "CartPole-v1", seed, 300.0 + 100 * seed) for seed in range(2)]
    _, text, (scores,), _ = made(tmp_path / "page", runs)
    assert (scores["normalised"], scores["frames"], scores["return \\[95 %\\]"]) == ("-", "1,000", "350 \\[300, 400\\]")
    assert "Reference" not in text and "Over games" not in text and (tmp_path / "page.png").exists()
    file = tmp_path / "scores.yaml"
    file.write_text("CartPole-v1: {random: 22, human: 500, other: 475}\n")
    _, text, (scores,), _ = made(tmp_path / "page", runs, "--reference", str(file))
    assert scores["normalised"] == "69 %" and scores["other"] == "475" and "no-ops" not in text


def test_runs_that_ended_early_do_not_cut_the_others_off(tmp_path: Path, undrawn: list[dict[str, list[Any]]]) -> None:
    early = trained(tmp_path / "early", PONG, 2, 0.0, done=100)
    made(tmp_path / "page", [trained(tmp_path / "whole", PONG, 1, 20.0), early])
    (groups,) = undrawn
    assert list(groups) == ["dqn", "dqn (ended early)"]
    (whole,) = groups["dqn"]
    assert whole.env_steps.tolist() == [500, 1_000] and whole.frame_skip == 4


def test_methods_whose_labels_begin_alike_are_curves_of_their_own(
    tmp_path: Path, undrawn: list[dict[str, list[Any]]]
) -> None:
    runs = [trained(tmp_path / str(i), "CartPole-v1", 1, 10.0 * i) for i in range(4)]
    names = ("algorithm.double", "algorithm.huber", "learner.lr", "store.alpha")
    for i, run in enumerate(runs):
        values = yaml.safe_load((run / "config.yaml").read_text())
        for j, name in enumerate(names):
            part, _, tail = name.partition(".")
            values[part][tail] = [not i & 1, bool(i & 1), 1e-3 * (1 + i % 2), 0.1 * (1 + i)][j]
        (run / "config.yaml").write_text(yaml.safe_dump(values))
    page = made(tmp_path / "page", runs)
    (groups,) = undrawn
    assert len(page.scores) == len(groups) == 4 and all(len(curves) == 1 for curves in groups.values())


def test_environments_whose_names_become_the_same_have_images_of_their_own(
    tmp_path: Path, undrawn: list[dict[str, list[Any]]]
) -> None:
    names = ("CartPole-v1", "veldt/Catch-v0", "veldt-Catch-v0")
    runs = [trained(tmp_path / str(i), "CartPole-v1", 1, 10.0) for i in range(3)]
    for run, name in zip(runs, names, strict=True):
        file = run / "config.yaml"
        file.write_text(file.read_text().replace("env: CartPole-v1", f"env: {name}"))
    page = made(tmp_path / "page (1)", runs)
    found = re.findall(r"!\[.*\]\((.*)\)", page.text)
    assert len(set(found)) == len(undrawn) == 3 and all((tmp_path / unquote(name)).exists() for name in found)
    assert not any(" " in name or "(" in name for name in found), "Markdown would end the link there"


@pytest.mark.usefixtures("undrawn")
def test_a_recipe_that_is_code_is_reported_without_importing_it(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", PONG, 7, 20.0)
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("recipe: dqn", "recipe: nowhere:mine"))
    (scores,), (row,) = made(tmp_path / "page", [run])[2:]
    assert scores["method"] == "nowhere:mine" and scores["frames"] == "4,000"
    assert (row["seed"], row["samples/s"], row["state"]) == ("7", "320", "finished")
    for text in ("recipe: nowhere:mine\n", "recipe: nowhere:mine\nsteps: many\nseed: 1\n"):
        file.write_text(text)
        with pytest.raises(UserError, match="is missing, or not a number"):
            command.run([str(run), "-o", str(tmp_path / "page")])


@pytest.mark.parametrize(("frames", "text"), [(999_499_999, "999 M"), (999_600_000, "1 G"), (22.8e9, "22.8 G"), (9, "9")])
def test_counts_of_frames(frames: float, text: str) -> None:
    assert count(frames) == text


@pytest.mark.usefixtures("undrawn")
def test_mistakes_are_said(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "CartPole-v1", 1, 20.0)
    with pytest.raises(UserError, match=r"is not a run directory: it has no config\.yaml"):
        command.run([str(run), str(tmp_path)])
    with pytest.raises(UserError, match="Name the runs"):
        command.run([])
    with pytest.raises(UserError, match=r"directory of .* does not exist"):
        command.run([str(run), "-o", str(tmp_path / "none" / "page")])
    for place in (".", "/", ".."):
        with pytest.raises(UserError, match="is a directory; name the page"):
            command.run([str(run), "-o", place])
    for text, match in (
        ("[1]", "must hold scores by environment"),
        ("CartPole-v1: {random: many}", "must hold scores by environment"),
        ("CartPole-v1: {random: 5, human: 5}", "are both 5"),
    ):
        (tmp_path / "scores.yaml").write_text(text)
        with pytest.raises(UserError, match=match):
            command.run([str(run), "-o", str(tmp_path / "page"), "--reference", str(tmp_path / "scores.yaml")])
    (run / "metrics.jsonl").unlink()
    _, _, (scores,), (row,) = made(tmp_path / "page", [run])
    assert scores["runs"] == "0 of 1 (1 unfinished)" and row["frames"] == "-" and "stopped at 0" in row["state"]


@pytest.mark.usefixtures("undrawn")
def test_settings_that_changed_on_the_way_are_said(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "CartPole-v1", 1, 20.0)
    lines = [
        {"env_steps": 500, "changed": {"learner.lr": [1e-3, 1e-4], "log.every": [1, 2]}},
        {"env_steps": 600, "changed": {"steps": [600, 1_000]}},
        {"env_steps": "x", "changed": []},
    ]
    (run / "config_history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, _, _, (row,) = made(tmp_path / "page", [run])
    assert row["state"] == "finished; changed learner.lr at 500 env steps"


def test_the_last_error_is_that_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert last_error(log) == ""
    log.write_text("2026-01-01 10:00:05,000 INFO stopped by an error\nTraceback:\nValueError: no\nSee x; y: z\n")
    assert last_error(log) == "ValueError: no"
    with log.open("a") as file:
        file.write("2026-01-01 11:00:00,000 INFO dqn on CartPole-v1, seed 0, store 8.1 MB\n")
    assert last_error(log) == ""


def test_the_bootstrap_draws_runs_within_each_game() -> None:
    """Against all draws with replacement of 3 and 2 runs, counted one by one."""
    games = [[0.0, 1.0, 5.0], [2.0, 10.0]]
    every = [
        (np.mean([np.mean(a), np.mean(b)]), float(interquartile_mean(np.array([[*a, *b]]))[0]))
        for a in itertools.product(games[0], repeat=3)
        for b in itertools.product(games[1], repeat=2)
    ]
    found = estimates(games, resamples=20_000)
    for name, exact, value in (("mean", [x for x, _ in every], 4.0), ("IQM", [x for _, x in every], 8 / 3)):
        assert found[name].value == pytest.approx(value)
        low, high = np.quantile(exact, [0.025, 0.975])
        assert found[name].low == pytest.approx(low, abs=0.35) and found[name].high == pytest.approx(high, abs=0.35)
    assert found == estimates(games, resamples=20_000), "seeded"
    assert estimates([[1.0], [2.0], [6.0]])["median"] == (2.0, None, None)


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end() -> None:
    assert interquartile_mean(np.array([[100.0, 1, 2, 3, 4, 5, 6, -50]])).tolist() == [3.5]
    assert interquartile_mean(np.array([[9.0, 0, 3]])).tolist() == [4.0], "three scores have no whole quarter"


def test_the_57_games_have_the_scores_of_the_papers() -> None:
    import ale_py
    import gymnasium as gym

    reference = atari57()
    gym.register_envs(ale_py)
    assert len(reference.games) == 57 and all(f"ALE/{game}-v5" in gym.registry for game in reference.games)
    assert reference.normalised("Breakout", 401.2) == pytest.approx((401.2 - 1.7) / (30.5 - 1.7))
    assert reference.normalised("CartPole-v1", 1.0) is None and game_of(PONG) == "Pong"
    covered = {name: sum(name in scores for scores in reference.games.values()) for name in reference.published}
    assert covered == {"DQN": 49, "Rainbow": 54, "Ape-X": 54, "IMPALA": 57, "PPO": 49}
    scores = [
        [x] for game, there in reference.games.items() if (x := reference.normalised(game, there["IMPALA"])) is not None
    ]
    found = estimates(scores)
    assert found["median"].value == pytest.approx(1.918, abs=5e-4), "as IMPALA's paper prints it"
    assert found["mean"].value == pytest.approx(9.576, abs=0.01), "about what it prints"
    assert add(Reference({}, {}), {PONG: {"random": 0, "human": 2}}, "file").normalised("Pong", 1.0) == 0.5


def test_text_of_a_run_is_shown_as_it_is() -> None:
    section = Section("S", Table(["a|b"], [["<b> *x* | [y](z)"]]), notes=["`q`"])
    text, html = markdown("T", [section], "cmd"), web("T", [section], "<cmd>")
    assert "| \\<b\\> \\*x\\* \\| \\[y\\](z) |" in text and "a\\|b" in text
    assert "<b>" not in html and "&lt;cmd&gt;" in html
