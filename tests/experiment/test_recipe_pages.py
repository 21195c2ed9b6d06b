"""The pages of the recipes are up to date, and say why a value is not the paper's."""

from __future__ import annotations

from pathlib import Path

import pytest

from veldt.experiment import recipe_pages
from veldt.experiment.papers import PAPERS
from veldt.experiment.prepare import introduction, prepare
from veldt.experiment.recipes import RECIPES, make
from veldt.experiment.settings import flat, without_effect

DOCS = Path(__file__).parents[2] / "docs" / "recipes"


@pytest.mark.parametrize("cores", [1, 3, 64])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_page_is_up_to_date_whatever_the_machine(recipe: str, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("common", "q_learning", "parameter_servers"):
        monkeypatch.setattr(f"veldt.experiment.recipes.{module}.core_count", lambda: cores)
    assert (DOCS / f"{recipe}.md").read_text() == recipe_pages.page(recipe), (
        "python -m veldt.experiment.recipe_pages docs/recipes"
    )


def test_every_recipe_has_a_page_and_no_other() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} == set(RECIPES) == set(PAPERS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_value_that_is_not_the_papers_has_a_reason(recipe: str) -> None:
    paper, ours = PAPERS[recipe], recipe_pages.effective(recipe, next(iter(recipe_pages.variants(recipe).values())))
    assert set(paper.why) == {name for name, value in paper.settings.items() if ours.get(name) != value}
    assert set(paper.elsewhere) <= set(paper.settings)


@pytest.mark.parametrize(
    ("recipe", "env", "told"),
    [
        ("r2d2", "CartPole-v1", "windows span the ends of episodes"),
        ("apex-dpg", "Pendulum-v1", "LayerNorm"),
        ("dqn", "CartPole-v1", ""),
    ],
)
def test_what_is_not_the_papers_and_no_setting_is_said_where_settings_are(
    recipe: str, env: str, told: str, tmp_path: Path
) -> None:
    """On the page, and in the first lines of a run."""
    printed = [x for x in introduction(prepare(make(recipe, env)), tmp_path) if x.startswith("not the paper's: ")]
    assert len(printed) == bool(told) and all(told in x for x in printed)
    assert ("Beside the settings, this is not the paper's:" in recipe_pages.page(recipe)) == bool(told)
    assert told in recipe_pages.page(recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_page_has_every_setting_that_has_an_effect(recipe: str) -> None:
    text = recipe_pages.page(recipe)
    for env in recipe_pages.variants(recipe).values():
        config = make(recipe, env)
        idle = without_effect(config) if config.topology in ("workers", "evolution") else ("algorithm.hidden",)
        for name, value in flat(config).items():
            if config.topology == "workers" and name == "store.capacity":
                assert f"| {name} |" not in text
            elif name.startswith(("algorithm.", "learner.lr", "store.capacity")) and value not in ("", (), None):
                assert f"| {name} |" in text or name in idle, name
    for name in PAPERS[recipe].settings:
        assert f"| {name} |" in text, "a setting that the paper has, and we have too"


def test_numbers_as_they_are_shown() -> None:
    values = (True, 2_500, 0.00025, 0.01 / 32**2, "1_000_000", (400, 300), "", None, "rmsprop")
    assert [recipe_pages.shown(value) for value in values] == [
        *("yes", "2,500", "0.00025", "9.766e-06", "1,000,000", "400, 300", "", "", "rmsprop")
    ]
