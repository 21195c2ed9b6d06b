"""Learning curves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_run import tiny

from veldt import recipes
from veldt.cli import plot
from veldt.cli.plot import Curve, band, group
from veldt.errors import UserError
from veldt.run import as_plain


def written(path: Path, lines: list[dict[str, float]], seed: int = 0, **changes: object) -> Path:
    """A run directory, as far as plotting reads one."""
    import yaml

    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(as_plain(recipes.make("dqn", seed=seed, **changes))))
    clocks = [{"time_s": x["env_steps"] / 100, "learner_steps": 0} | x for x in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in clocks))
    return path


def test_several_seeds_become_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [tiny(tmp_path / f"s{seed}", seed=seed, steps=700, **{"eval.every": 200}) for seed in range(2)]
    out = tmp_path / "curves.png"
    assert plot.run([*(str(run.path) for run in runs), "-o", str(out)]) == 0
    assert "dqn CartPole-v1" in capsys.readouterr().out
    assert [len(curves) for curves in group([Curve.read(run.path) for run in runs]).values()] == [2]
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
    curve = Curve.read(both)
    assert curve.greedy and curve.env_steps.tolist() == [20, 30] and curve.returns.tolist() == [7, 9]
    assert curve.time_s.tolist() == [0.2, 0.3]
    curve = Curve.read(written(tmp_path / "b", [{"env_steps": 10, "train_return": 1.0}, {"env_steps": 20}]))
    assert not curve.greedy and curve.returns.tolist() == [1]


def test_what_was_done_again_is_drawn_once(tmp_path: Path) -> None:
    lines = [{"env_steps": 10, "eval_return": 1.0}, {"env_steps": 20, "eval_return": 2.0}]
    path = written(tmp_path / "a", [*lines, {"env_steps": 10, "resumed_from": 5}, {"env_steps": 20, "eval_return": 3.0}])
    assert Curve.read(path).returns.tolist() == [1, 3]


def test_the_band_is_least_mean_and_largest_where_all_seeds_are() -> None:
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
    assert plot.run([*map(str, paths), "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").stat().st_size > 1_000


@pytest.mark.parametrize("change", [{"env": "veldt/Chain-v0"}, {"learner.lr": 0.5}], ids=str)
def test_runs_that_differ_in_more_than_their_seed_are_other_curves(tmp_path: Path, change: dict[str, object]) -> None:
    line = [{"env_steps": 1, "eval_return": 1.0}]
    paths = [written(tmp_path / "a", line), written(tmp_path / "b", line, seed=1), written(tmp_path / "c", line, **change)]
    groups = group([Curve.read(path) for path in paths])
    assert sorted(len(curves) for curves in groups.values()) == [1, 2]
    assert any(str(next(iter(change.values()))) in name for name in groups), "the name says how they differ"


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    good = written(tmp_path / "good", [{"env_steps": 1, "eval_return": 1.0}])
    empty = written(tmp_path / "empty", [{"env_steps": 1}])
    for argv, says in (
        ([], "Say which runs to plot"),
        ([str(tmp_path / "none")], "is not a run directory"),
        ([str(empty)], "has no returns yet"),
        ([str(good), "-o", str(tmp_path / "no" / "x.png")], "cannot be written"),
        ([str(good), "-o", str(tmp_path / "x.zzz")], "cannot be written"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            plot.run(argv)
        assert "\n" not in str(caught.value)
