"""Learning curves, and rates over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_run import tiny
from test_view import FULL, OLD

from veldt.cli import plot as command
from veldt.cli.plot import read_curve
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.settings import as_plain
from veldt.watching import plot
from veldt.watching.plot import band, group, smooth
from veldt.watching.plot_rates import PANELS, Rates, _names, thin


def written(path: Path, lines: list[dict[str, Any]], seed: int = 0, **changes: object) -> Path:
    """The files of a run directory that plotting reads."""
    import yaml

    path.mkdir(parents=True)
    (path / "config.yaml").write_text(
        yaml.safe_dump(as_plain(recipes.make(str(changes.pop("recipe", "dqn")), seed=seed, **changes)))
    )
    clocks = [{"time_s": x["env_steps"] / 100, "learner_steps": 0} | x for x in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in clocks))
    return path


def test_several_seeds_become_one_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tiny(tmp_path / f"s{seed}", seed=seed, steps=700, **{"eval.every": 200}) for seed in range(2)]
    out = tmp_path / "curves.png"
    assert command.run([*(str(run.path) for run in runs), "-o", str(out)]) == 0
    assert "dqn CartPole-v1" in capsys.readouterr().out
    assert [len(curves) for curves in group([read_curve(run.path) for run in runs]).values()] == [2]
    with Image.open(out) as image:
        assert image.format == "PNG" and image.width > 1_000
        colours = image.convert("RGB").getcolors(maxcolors=10**7)
        assert colours is not None and len(colours) > 20


def test_a_curve_is_the_greedy_returns_or_else_the_exploring_ones(tmp_path: Path) -> None:
    both = written(
        tmp_path / "a",
        [
            {"env_steps": 10, "train_return": 1.0},
            {"env_steps": 20, "train_return": 2.0, "eval_return": 7.0},
            {"env_steps": 30, "eval_return": 9.0},
        ],
    )
    curve = read_curve(both)
    assert curve.greedy and curve.env_steps.tolist() == [20, 30] and curve.returns.tolist() == [7, 9]
    assert curve.time_s.tolist() == [0.2, 0.3]
    own = {"eval_env_steps": 15, "eval_time_s": 0.125}  # of the weights that played
    curve = read_curve(written(tmp_path / "c", [{"env_steps": 20, "eval_return": 7.0, **own}]))
    assert curve.env_steps.tolist() == [15] and curve.time_s.tolist() == [0.125] and curve.returns.tolist() == [7]
    curve = read_curve(written(tmp_path / "b", [{"env_steps": 10, "train_return": 1.0}, {"env_steps": 20}]))
    assert not curve.greedy and curve.returns.tolist() == [1]


def test_repeated_steps_are_drawn_once(tmp_path: Path) -> None:
    lines = [{"env_steps": 10, "eval_return": 1.0}, {"env_steps": 20, "eval_return": 2.0}]
    path = written(tmp_path / "a", [*lines, {"env_steps": 10, "resumed_from": 5}, {"env_steps": 20, "eval_return": 3.0}])
    assert read_curve(path).returns.tolist() == [1, 3]


def test_the_band_is_smallest_mean_and_largest_where_all_seeds_have_values() -> None:
    xs = [np.array([0.0, 10.0]), np.array([2.0, 8.0]), np.array([0.0, 20.0])]
    ys = [np.array([0.0, 10.0]), np.array([5.0, 5.0]), np.array([0.0, 0.0])]
    grid, low, mean, high = band(xs, ys)
    assert grid[0] == 2 and grid[-1] == 8
    np.testing.assert_allclose(low, 0)
    np.testing.assert_allclose(mean, (grid + 5) / 3)
    np.testing.assert_allclose(high, np.maximum(grid, 5))


def test_one_run_is_drawn_as_it_is() -> None:
    x, y = np.array([1.0, 5.0]), np.array([2.0, 3.0])
    for part, expected in zip(band([x], [y]), (x, y, y, y), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("points", [1, 2])
def test_short_and_disjoint_runs_can_be_drawn(tmp_path: Path, points: int) -> None:
    paths = [
        written(
            tmp_path / f"s{seed}",
            [{"env_steps": 1_000 * seed + k, "eval_return": k} for k in range(1, points + 1)],
            seed=seed,
        )
        for seed in range(2)
    ]
    assert command.run([*map(str, paths), "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1_000


@pytest.mark.parametrize("change", [{"env": "veldt/Chain-v0"}, {"learner.lr": 0.5}], ids=str)
def test_runs_that_differ_in_more_than_their_seed_are_other_curves(tmp_path: Path, change: dict[str, object]) -> None:
    line = [{"env_steps": 1, "eval_return": 1.0}]
    paths = [written(tmp_path / "a", line), written(tmp_path / "b", line, seed=1), written(tmp_path / "c", line, **change)]
    groups = group([read_curve(path) for path in paths])
    assert sorted(len(curves) for curves in groups.values()) == [1, 2]
    assert any(str(next(iter(change.values()))) in name for name in groups), "the name says how they differ"


def test_an_error_says_what_cannot_be_drawn(tmp_path: Path) -> None:
    good = written(tmp_path / "good", [{"env_steps": 1, "eval_return": 1.0}])
    empty = written(tmp_path / "empty", [{"env_steps": 1}])
    for argv, says in (
        ([], "Name the runs to plot"),
        ([str(tmp_path / "none")], "is not a run directory"),
        ([str(empty)], "has no returns yet"),
        ([str(good), "-o", str(tmp_path / "no" / "x.png")], "cannot be written"),
        ([str(good), "-o", str(tmp_path / "x.zzz")], "cannot be written"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            command.run(argv)
        assert "\n" not in str(caught.value)


def pictures(monkeypatch: pytest.MonkeyPatch, *argv: object) -> list[Any]:
    """The axes of the image that `veldt plot` writes."""
    figures: list[Any] = []
    save = plot.save
    monkeypatch.setattr(plot, "save", lambda figure, out: (figures.append(figure), save(figure, out)))
    assert command.run([str(x) for x in argv]) == 0
    return list(figures[0].axes)


POINTS = [{"env_steps": 100 * k, "learner_steps": 10 * k, "eval_return": 1.0 * k} for k in range(1, 6)]


def test_labels_have_what_differs_and_nothing_else(tmp_path: Path) -> None:
    def label(*settings: dict[str, Any]) -> list[str]:
        paths = [written(tmp_path / f"{number()}", POINTS, **x) for x in settings]
        return list(group([read_curve(path) for path in paths]))

    number = iter(range(100)).__next__
    assert label({}, {"seed": 1}) == ["dqn CartPole-v1"]
    assert label({"learner.lr": 1e-2}, {"learner.lr": 1e-4}) == ["lr 0.01", "lr 0.0001"]
    assert label({}, {"recipe": "apex-dqn"}) == ["dqn", "apex-dqn"], "not the settings in which recipes differ"
    assert label({}, {"recipe": "apex-dqn"}, {"learner.lr": 0.5}) == ["dqn, lr 0.001", "apex-dqn", "dqn, lr 0.5"]
    assert label({}, {"algorithm.double": False}) == ["double on", "double off"]
    assert label({}, {"env": "/home/me/lab/mine.py:Hover"}) == ["CartPole-v1", "mine.py:Hover"]
    many = {"learner.lr": 0.5, "learner.batch": 7, "actor.epsilon_end": 0.3, "store.min_size": 13, "learner.clip_norm": 2}
    assert label({}, many) == ["13", "14"], "directories, where they would be long"


def test_a_title_says_what_all_curves_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = written(tmp_path / "1", POINTS), written(tmp_path / "2", POINTS, recipe="apex-dqn")
    (left, right) = pictures(monkeypatch, one, "-o", tmp_path / "x.png")
    assert left.get_title("left") == "dqn on CartPole-v1" and left.get_legend() is None
    assert (left.get_xlabel(), right.get_xlabel()) == ("env steps", "time (s)")
    left, _ = pictures(monkeypatch, one, two, "-o", tmp_path / "x.png")
    assert left.get_title("left") == "CartPole-v1"
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["dqn", "apex-dqn"]


def test_runs_that_cannot_be_drawn_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, empty = written(tmp_path / "good", POINTS), written(tmp_path / "empty", [{"env_steps": 1}])
    (tmp_path / "curves.png").touch()
    assert command.run([*map(str, (good, empty, tmp_path / "curves.png")), "-o", str(tmp_path / "x.png")]) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'x.png'}: dqn CartPole-v1 (1 run)\n"
    assert err.count("\n") == 2 and f"left out: {empty} has no returns yet" in err and "curves.png is not a run" in err


@pytest.mark.parametrize(
    ("x", "label", "last"),
    [("steps", "env steps", 500), ("frames", "frames", 2_000), ("hours", "time (h)", 5 / 3600), ("updates", "updates", 50)],
)
def test_a_curve_can_be_drawn_against_each_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: str, label: str, last: float
) -> None:
    path = written(tmp_path / "r", POINTS, **({"env": "ALE/Pong-v5"} if x == "frames" else {}))
    (axis,) = pictures(monkeypatch, path, "-o", tmp_path / "x.png", "--x", x, "--log", "xy")
    assert axis.get_xlabel() == label and axis.lines[0].get_xdata()[-1] == pytest.approx(last)
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")


def test_returns_below_zero_have_a_logarithmic_axis_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "r", [x | {"eval_return": -x["eval_return"]} for x in POINTS])
    axis, _ = pictures(monkeypatch, path, "-o", tmp_path / "x.png", "--log", "y")
    assert axis.get_yscale() == "symlog" and axis.get_xscale() == "linear"


@pytest.mark.parametrize(("name", "begins"), [("x.png", b"\x89PNG"), ("x.svg", b"<?xml"), ("x.pdf", b"%PDF")])
def test_the_name_of_the_image_decides_its_format(tmp_path: Path, name: str, begins: bytes) -> None:
    assert command.run([str(written(tmp_path / "r", POINTS)), "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_smoothing_is_a_mean_of_neighbours() -> None:
    y = np.array([0.0, 3.0, 6.0, 0.0, 9.0])
    assert smooth(y, 1).tolist() == y.tolist()
    np.testing.assert_allclose(smooth(y, 3), [1.5, 3, 3, 5, 4.5])
    np.testing.assert_allclose(smooth(y, 99), [3.6] * 5)


def test_from_five_seeds_on_the_band_is_an_interval_of_the_mean_or_of_the_middle_half() -> None:
    xs = [np.array([0.0, 1.0])] * 8
    ys = [np.full(2, y) for y in (0.0, 1, 2, 3, 4, 5, 6, 1_000)]
    _, low, mean, high = band(xs, ys)
    assert mean[0] == np.mean([y[0] for y in ys]) and 1 < low[0] < 10 and 200 < high[0] < 600
    _, low, iqm, high = band(xs, ys, iqm=True)
    assert iqm[0] == 3.5 and 1 < low[0] < 3 and high[0] > 5, "one outlier does not move it"


# Rates.


def pixels(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.size


def drawn(monkeypatch: pytest.MonkeyPatch, *argv: object) -> list[Any]:
    """The axes of the image that `veldt plot --rates` writes."""
    figures: list[Any] = []
    save = plot.save
    monkeypatch.setattr(plot, "save", lambda figure, out: (figures.append(figure), save(figure, out)))
    assert command.run([*map(str, argv), "--rates"]) == 0
    return [axis for axis in figures[0].axes if axis.get_visible()]


def test_rates_of_a_new_and_an_old_run_become_one_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = written(tmp_path / "new", [FULL | {"env_steps": n, "time_s": n / 10, "wait/actor": n / 100} for n in range(50)])
    old = written(tmp_path / "old", [OLD | {"env_steps": n, "time_s": n / 10} for n in range(50)])
    axes = drawn(monkeypatch, new, old, "-o", tmp_path / "both.png")
    assert [axis.get_title("left") for axis in axes] == [panel.title for panel in PANELS]
    assert pixels(tmp_path / "both.png")[0] > 1_000
    assert "both.png" in capsys.readouterr().out
    waits = axes[[panel.title for panel in PANELS].index("waiting, fraction of the time")]
    lines = [line for line in waits.lines if len(line.get_xdata())]
    assert len(lines) == 2, "the old run lacks them"
    np.testing.assert_allclose(lines[0].get_ydata(), np.arange(50) / 100)
    np.testing.assert_allclose(lines[0].get_xdata(), np.arange(50) / 10)
    assert waits.get_title("right") == "missing in old" and not axes[0].get_title("right")
    assert [text.get_text() for text in waits.get_legend().get_texts()] == ["actors", "learner"]


def test_metrics_that_an_old_run_lacks_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = written(tmp_path / "old", [OLD | {"env_steps": n, "time_s": n / 10} for n in range(50)])
    axes = drawn(monkeypatch, old, "-o", tmp_path / "old.png")
    assert [axis.get_title("left") for axis in axes] == ["env steps/s", "updates/s", "replay ratio"]


def test_missing_and_invalid_numbers_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, Any]] = [
        {"env_steps": 1, "time_s": 1.0, "env_steps_per_s": 10.0, "cpu/all": None},
        {"env_steps": 2, "time_s": 2.0, "env_steps_per_s": None},
        {"env_steps": 3, "time_s": 3.0, "env_steps_per_s": "fast"},
        {"env_steps": 4, "time_s": None, "env_steps_per_s": 1e9},
        {"env_steps": 5, "time_s": 5.0, "env_steps_per_s": 30.0},
    ]
    (axis,) = drawn(monkeypatch, written(tmp_path / "r", lines), "-o", tmp_path / "x.png")
    assert axis.lines[0].get_xdata().tolist() == [1, 5] and axis.lines[0].get_ydata().tolist() == [10, 30]
    (axis,) = drawn(monkeypatch, written(tmp_path / "one", lines[:1]), "-o", tmp_path / "one.png")
    assert axis.lines[0].get_marker() == ".", "one point alone can be seen"


def test_rates_of_a_resumed_run_continue_in_time(tmp_path: Path) -> None:
    lines = [{"env_steps": n, "time_s": n, "env_steps_per_s": n} for n in (10, 20, 30)]
    again = [
        {"env_steps": 20, "time_s": 21.0, "resumed_from": 5},
        {"env_steps": 30, "time_s": 33.0, "env_steps_per_s": 7.0},
    ]
    found = Rates.read(written(tmp_path / "r", [*lines, *again]))
    assert found.time_s.tolist() == [10, 20, 21, 33]
    np.testing.assert_array_equal(found.values["env_steps_per_s"], [10, 20, np.nan, 7])


def test_rates_of_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(tmp_path / "r", steps=5_000)
    titles = [axis.get_title("left") for axis in drawn(monkeypatch, run.path, "-o", tmp_path / "x.png")]
    assert {"env steps/s", "updates/s", "replay ratio", "memory"} <= set(titles)


def test_the_default_name_of_the_image_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "r", [{"env_steps": 1, "eval_return": 1.0, "env_steps_per_s": 3.0}])
    assert command.run([str(path)]) == 0 and command.run([str(path), "--rates"]) == 0
    assert {x.name for x in tmp_path.glob("*.png")} == {"curves.png", "rates.png"}


def test_a_long_run_is_drawn_by_means_over_intervals() -> None:
    x = np.linspace(0, 1_000, 30_000)
    y = np.where(np.arange(30_000) % 2, 1.0, 3.0)
    y[500] = np.nan
    grid, means = thin(x, y)
    assert len(grid) == 300 and (np.diff(grid) > 0).all() and grid[0] < 4 and grid[-1] > 996
    np.testing.assert_allclose(means, 2.0, atol=0.03)
    few = thin(x[:7], y[:7])
    assert few[0].tolist() == x[:7].tolist() and few[1].tolist() == y[:7].tolist()
    assert len(thin(np.zeros(1_000), np.ones(1_000))[0]) == 1_000, "a clock that stands still"


def test_runs_with_the_same_name_are_distinguished() -> None:
    runs = [Rates(Path(path), np.zeros(0), {}) for path in ("/a/r", "/b/r", "/b/s")]
    assert _names(runs) == ["a/r", "b/r", "s"]


def test_rates_that_cannot_be_drawn_are_refused(tmp_path: Path) -> None:
    silent = written(tmp_path / "silent", [{"env_steps": 1, "eval_return": 1.0}])
    timeless = written(tmp_path / "timeless", [{"env_steps": 1, "env_steps_per_s": 1.0, "time_s": None}])
    for argv, says in (
        (["--rates"], "Name the runs to plot"),
        ([str(tmp_path / "none"), "--rates"], "is not a run directory"),
        ([str(silent), "--rates"], "has no rates yet"),
        ([str(timeless), "--rates"], "has no rates yet"),
    ):
        with pytest.raises(UserError, match=says):
            command.run(argv)
