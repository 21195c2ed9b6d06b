"""Recipes, and settings by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml

import veldt
from veldt import callables
from veldt.counters import Counters
from veldt.envs import has_continuous_actions, make_env
from veldt.errors import UserError, did_you_mean
from veldt.experiment import recipes, settings
from veldt.experiment.config import Config
from veldt.experiment.directory import load_config
from veldt.experiment.exploring import LadderConfig
from veldt.experiment.recipes import RECIPES
from veldt.experiment.settings import as_plain, flat, override
from veldt.records.block import Block
from veldt.seeds import derive
from veldt.storing.ranks import Ranked
from veldt.storing.selectors import Prioritized, Uniform
from veldt.topologies.stores import make_replay, store_size


@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5", "MinAtar/Breakout-v1"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_sound_and_survives_yaml(recipe: str, env: str) -> None:
    config = recipes.make(recipe, env, **({"demos": "there"} if recipe == "r2d3" else {}))
    settings.check(config)
    assert config.recipe == recipe and config.env == env
    assert override(recipes.make(recipe, env), as_plain(config)) == config
    assert RECIPES[recipe].__doc__


def test_atari_has_the_numbers_of_the_paper() -> None:
    """Mnih et al. 2015, extended data table 1; the optimizer's are in `test_papers_optimizers`."""
    config = recipes.make("dqn", "ALE/Pong-v5")
    assert config.learner.batch == 32
    assert config.learner.target_every * 4 == 10_000, "agent steps, as in the authors' code"
    assert (config.algorithm.gamma, config.algorithm.history, config.algorithm.clip_reward) == (0.99, 4, 1.0)  # type: ignore[attr-defined]
    assert (config.actor.epsilon, config.actor.epsilon_end, config.actor.epsilon_steps) == (1.0, 0.1, 1_000_000)
    assert (config.store.capacity, config.store.min_size) == ("1_000_000", 50_000)
    assert config.store.samples_per_insert / config.learner.batch == 1 / 4, "one update every four actions"
    assert (config.protocol, config.eval.epsilon, config.steps) == ("dqn", 0.05, 50_000_000)


def test_atari_has_the_numbers_of_the_r2d2_paper() -> None:
    """Kapturowski et al. 2019, table 2; and the replay ratio of 0.8 that the text tells."""
    config = recipes.make("r2d2", "ALE/Pong-v5")
    of, store, learner = config.algorithm, config.store, config.learner
    assert (of.burn_in, of.length, of.length - of.stride, of.n, of.gamma) == (40, 80, 40, 5, 0.997)  # type: ignore[attr-defined]
    assert (of.history, of.lstm, of.head, of.eta, of.h_epsilon, of.clip_reward) == (4, 512, 512, 0.9, 1e-3, 0)  # type: ignore[attr-defined]
    assert (store.capacity, store.alpha, store.beta, store.samples_per_insert) == ("4_000_000", 0.9, 0.6, 0.8)
    assert (learner.optimizer, learner.batch, learner.lr, learner.eps) == ("adam", 64, 1e-4, 1e-3)
    assert learner.target_every == 2_500
    assert (config.actor.refresh, config.actor.epsilon, config.actor.alpha, config.protocol) == (400, 0.4, 7.0, "r2d2")


def test_r2d3_has_the_sequences_of_its_paper() -> None:
    """Gulcehre et al. 2020: sequences of 80 that overlap by 40, begin with a state of zero and a burn-in of 40."""
    config = recipes.make("r2d3", "ALE/Pong-v5")
    of = config.algorithm
    assert of.burn_in + of.length == 80 and of.burn_in + of.length - of.stride == 40 and of.burn_in == 40
    assert not of.stored_state and (of.n, of.gamma, of.eta) == (5, 0.997, 0.9)
    assert (config.demo_ratio, config.store.alpha, config.store.beta, config.learner.batch) == (1 / 256, 0.9, 0.6, 64)


def test_r2d3_asks_for_demonstrations() -> None:
    with pytest.raises(UserError, match="give their directory with --demos"):
        settings.check(recipes.make("r2d3"))


def test_a_recipe_asks_which_actions_a_gymnasium_id_has_and_imports_no_module_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A saved config may name any module, and is read before it is trusted."""
    for recipe in ("impala", "seed-vtrace"):
        gammas = [recipes.make(recipe, env).algorithm.gamma for env in ("CartPole-v1", "Pendulum-v1")]  # type: ignore[attr-defined]
        assert gammas[0] > gammas[1]
    imported: list[str] = []
    monkeypatch.setattr(callables, "find", imported.append)
    monkeypatch.setattr(gym, "make", lambda name, **how: imported.append(name))
    assert not has_continuous_actions("colossal:Pendulum-v1") and not has_continuous_actions("there.py:Hover")
    assert not imported


def test_an_environment_is_made_once_however_many_configs_ask_for_its_actions() -> None:
    """A plot of many runs reads many configs."""
    made: list[Any] = []

    class Noisy(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-1, 1, (2,))

        def __init__(self, size: float) -> None:
            made.append(self)
            self.action_space = gym.spaces.Box(-1, 1, (2,)) if size else gym.spaces.Discrete(2)

        def close(self) -> None:
            raise OSError("its window is gone")

    try:
        for size in (1.0, 0.0):  # an id may be registered again, as another environment
            gym.register("Noisy-v0", entry_point=Noisy, kwargs={"size": size})
            gammas = {recipes.make("impala", "Noisy-v0").algorithm.gamma for _ in range(3)}  # type: ignore[attr-defined]
            assert gammas == {0.97 if size else 0.995}
            del gym.registry["Noisy-v0"]
    finally:
        gym.registry.pop("Noisy-v0", None)
    assert len(made) == 2


def test_an_environment_that_cannot_be_made_has_no_continuous_actions_that_are_known() -> None:
    def broken() -> Any:
        raise OSError("no display")

    gym.register("Unmade-v0", entry_point=broken)
    try:
        assert not has_continuous_actions("Unmade-v0") and not has_continuous_actions("NotThere-v0")
    finally:
        del gym.registry["Unmade-v0"]


def test_overrides_by_dotted_name_and_by_nested_dict() -> None:
    config = recipes.make("dqn", steps=5, **{"learner.lr": 1, "algorithm.hidden": [8, 9], "store.capacity": 700})
    assert (config.steps, config.learner.lr, config.algorithm.hidden, config.store.capacity) == (5, 1.0, (8, 9), "700")  # type: ignore[attr-defined]
    assert isinstance(config.learner.lr, float)
    nested = override(config, {"learner": {"lr": 2.0, "batch": 3}, "envs_per_actor": 1})
    assert (nested.learner.lr, nested.learner.batch, nested.envs_per_actor) == (2.0, 3, 1)
    assert recipes.make("dqn").learner.lr != 1.0, "the recipe itself is not changed"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"stpes": 1}, "There is no setting 'stpes'. Did you mean steps"),
        ({"learner.lrr": 1}, "There is no setting learner.'lrr'. Did you mean lr"),
        ({"learner": 1}, "learner is a group of settings"),
        ({"steps": "many"}, "steps must be a int, not 'many'"),
        ({"steps": 1.5}, "steps must be a int, not 1.5"),
        ({"steps": True}, "steps must be a int, not True"),
        ({"steps": None}, "steps must be a int, not None"),
        ({"steps": float("inf")}, "steps must be a int, not inf"),
        ({"steps": float("nan")}, "steps must be a int, not nan"),
        ({"learner.anneal": 1}, "learner.anneal must be a bool, not 1"),
        ({"learner.lr": "fast"}, "learner.lr must be a float, not 'fast'"),
        ({"algorithm.hidden": 64}, "algorithm.hidden must be a tuple, not 64"),
        ({"steps.x": 5}, "steps"),
        ({"learner.optimizer": "adamw"}, "learner.optimizer"),
        ({"store.selector": "priorized"}, "store.selector"),
        ({"runtime": "cloud"}, "runtime"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(values: dict[str, Any], says: str) -> None:
    def make() -> None:
        config = recipes.make("dqn", **values)
        settings.check(config)

    with pytest.raises(UserError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "steps",
        "threads",
        "envs_per_actor",
        "actor.block",
        "learner.batch",
        "learner.target_every",
        "learner.publish_every",
        "learner.prefetch",
        "learner.trim_every",
        "learner.lr",
        "actors",
        "step_timeout",
        "restart.limit",
        "restart.window",
        "eval.episodes",
        "checkpoint.keep",
        "log.every",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_that_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} must be greater than 0, not {value}"):
        settings.check(recipes.make("dqn", **{name: value}))


@pytest.mark.parametrize(
    "name",
    ["seed", "store.min_size", "store.samples_per_insert", "store.slack", "eval.every", "checkpoint.every", "memory.limit"],
)
def test_numbers_that_must_not_be_negative(name: str) -> None:
    settings.check(recipes.make("dqn", **{name: 0}))
    with pytest.raises(UserError, match=f"{name} must not be negative"):
        settings.check(recipes.make("dqn", **{name: -1}))


def test_a_rate_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match=r"learner\.lr must be greater than 0"):
        settings.check(recipes.make("dqn", **{"learner.lr": float("nan")}))


def test_a_store_too_small_to_learn_from_is_refused() -> None:
    config = recipes.make("dqn", **{"store.capacity": "500", "store.min_size": 1_000})
    envs = make_env("CartPole-v1")
    with pytest.raises(UserError, match=r"the 1,000 that learning starts with; .*store\.capacity"):
        store_size(config, config.schema(envs.spec))


def test_an_unknown_recipe_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"There is no recipe 'dqnn'\. Did you mean dqn"):
        recipes.make("dqnn")
    with pytest.raises(UserError, match=r"There are: .*dqn"):
        recipes.make("zzzz")


def test_epsilon_falls_in_a_line() -> None:
    config = recipes.make("dqn", **{"actor.epsilon": 0.8, "actor.epsilon_end": 0.2, "actor.epsilon_steps": 100})
    values = [config.actor.explore(0, 1, 1)(steps) for steps in (0, 50, 100, 1_000)]
    np.testing.assert_allclose(values, [0.8, 0.5, 0.2, 0.2])
    at_once = recipes.make("dqn", **{"actor.epsilon_steps": 0, "actor.epsilon_end": 0.1})
    assert at_once.actor.explore(0, 1, 1)(1) == pytest.approx(0.1)


def test_selectors_by_name() -> None:
    uniform = recipes.make("dqn")
    schema = uniform.schema(make_env("CartPole-v1").spec)
    assert isinstance(make_replay(uniform, schema).selector, Uniform)
    chosen = {"store.selector": "prioritized", "store.alpha": 0.7, "store.beta": 0.5}
    prioritized = make_replay(recipes.make("dqn", **chosen), schema).selector
    assert isinstance(prioritized, Prioritized)
    assert (prioritized.alpha, prioritized.beta) == (0.7, 0.5)
    ranked = make_replay(recipes.make("dqn", **chosen | {"store.selector": "ranked"}), schema).selector
    assert isinstance(ranked, Ranked) and (ranked.alpha, ranked.beta) == (0.7, 0.5)


@pytest.mark.parametrize("selector", ["prioritized", "ranked"])
def test_weights_with_an_annealed_beta_are_their_definition(selector: str) -> None:
    """w_i = (N P(i))^-beta / max w, where beta goes linearly from 0.4 to 1 over the env steps of the run."""
    changes = {"store.selector": selector, "store.beta": 0.4, "store.beta_end": 1.0, "steps": 2_000, "store.min_size": 1}
    config, counters = recipes.make("dqn", **changes), Counters()
    schema, rng = config.schema(make_env("CartPole-v1").spec), np.random.default_rng(0)
    store = make_replay(config, schema, None, counters)
    for _ in range(3):
        rows, starts = schema.layout.zeros(schema.rows), schema.start_layout.zeros(schema.starts)
        block = Block(schema, rows, starts, np.ones(schema.starts, np.bool_))
        assert store.insert(block, rng.random(schema.starts))
    for steps, beta in ((0, 0.4), (500, 0.55), (500, 0.7), (1_000, 1.0), (1_000, 1.0)):  # one more than the run has
        counters.add("env_steps", steps)
        sample = store.sample(16)
        assert sample is not None
        weights = (3 * schema.starts * sample.probability) ** -beta
        np.testing.assert_allclose(sample.weights, weights / weights.max(), rtol=1e-6)


def test_beta_is_constant_unless_it_has_an_end() -> None:
    for recipe in ("apex-dqn", "r2d2"):
        config, counters = recipes.make(recipe), Counters()
        store = make_replay(config, config.schema(make_env("CartPole-v1").spec), None, counters)
        counters.add("env_steps", config.steps)
        assert store.selector.beta == config.store.beta


@pytest.mark.parametrize(
    "flags",
    [
        {"store.selector": "prioritized", "store.alpha": 0.6, "store.beta": 0.4},
        {"store.selector": "ranked", "store.alpha": 0.7, "store.beta": 0.5},
    ],
    ids=["proportional", "rank-based"],
)
def test_dqn_takes_the_settings_of_prioritized_replay(flags: dict[str, Any]) -> None:
    """Schaul et al. 2016: double DQN, a quarter of the learning rate, beta annealed to 1, the largest priority at first."""
    common = {"store.beta_end": 1.0, "store.first_priorities": "largest", "learner.lr": 6.25e-5, "algorithm.double": True}
    base = recipes.make("dqn", "ALE/Pong-v5")
    config = override(base, flags | common)
    settings.check(config)
    settings.refuse_without_effect(config, base)
    assert config.learner.lr == base.learner.lr / 4 and config.store.capacity == "1_000_000"


def test_flat_names_every_setting() -> None:
    names = flat(Config())
    assert {"steps", "learner.lr", "store.capacity", "algorithm.gamma", "checkpoint.every"} <= set(names)


def test_streams_of_random_numbers_have_names() -> None:
    seeds = [derive(0, "a"), derive(0, "b"), derive(1, "a"), derive(0, "a", 0), derive(0, "a", 1), derive(0, "a", "0")]
    assert len(set(seeds)) == len(seeds)
    assert derive(0, "a", 1) == derive(0, "a", 1)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_suggestions() -> None:
    assert did_you_mean("trian", ["train", "eval"]) == " Did you mean train?"
    assert did_you_mean("qqqq", ["train", "eval"]) == ""


def test_yaml_floats_that_look_like_strings_are_numbers() -> None:
    assert recipes.make("dqn", "CartPole-v1", **{"learner.lr": "5e-4"}).learner.lr == 5e-4
    with pytest.raises(UserError, match=r"learner\.lr"):
        recipes.make("dqn", "CartPole-v1", **{"learner.lr": "fast"})


# Settings without effect.


@pytest.mark.parametrize(
    ("recipe", "values", "needs"),
    [
        ("apex-dqn", {"inference": "central", "actor.refresh": 3}, "actor.refresh .* --inference local"),
        ("apex-dqn", {"central.wait_ms": 3.0}, "central.wait_ms .* --inference central"),
        ("dqn", {"learner.decay": 0.5}, "learner.decay .* --learner.optimizer rmsprop"),
        (
            "dqn",
            {"learner.optimizer": "sgd", "learner.eps": 0.5},
            "learner.eps .* --learner.optimizer adam, rmsprop",
        ),
        ("dqn", {"store.alpha": 0.9}, "store.alpha .* --store.selector prioritized"),
        ("dqn", {"step_timeout": 3.0}, "step_timeout .* --runtime local"),
        ("dqn", {"runtime": "local", "queue": 3}, "queue .* processes of their own"),
        ("apex-dqn", {"gate.seats": 3}, "gate.seats .* --gate.listen"),
        ("apex-dqn", {"gate.compress": True}, "gate.compress .* --transport grpc"),
        ("r2d2", {"demo_ratio": 0.5}, "demo_ratio .* --demos"),
        ("r2d2", {"algorithm.lstm": 0, "algorithm.clip_last_reward": 1.0}, "algorithm.clip_last_reward .* an LSTM"),
        ("impala", {"store.actors_wait": False}, "store.actors_wait .* a replay store"),
        ("impala", {"store.min_size": 10}, "store.min_size .* a replay store"),
        ("impala", {"learner.target_every": 10}, "learner.target_every .* a target network"),
        ("dqn", {"learner.trim_every": 10}, "learner.trim_every .* --store.slack"),
    ],
    ids=str,
)
def test_a_setting_without_effect_is_refused(recipe: str, values: dict[str, Any], needs: str) -> None:
    base, config = recipes.make(recipe), recipes.make(recipe, **values)
    settings.check(config)
    with pytest.raises(UserError, match=needs.replace(" .* ", " has no effect here: it needs .*")):
        settings.refuse_without_effect(config, base)
    with pytest.raises(UserError, match="has no effect here"):
        veldt.train(recipe, **values)


def test_a_setting_without_effect_is_refused_at_its_default_too() -> None:
    """Where the recipe has another value than the class."""
    base = recipes.make("apex-dqn", "ALE/Pong-v5")
    assert base.actor.refresh != LadderConfig().refresh
    config = override(base, {"inference": "central", "actor.refresh": LadderConfig().refresh})
    with pytest.raises(UserError, match=r"actor\.refresh has no effect here: it needs --inference local"):
        settings.refuse_without_effect(config, base)
    settings.refuse_without_effect(override(base, {"inference": "central"}), base)


@pytest.mark.parametrize("env", ["ALE/Pong-v5", "MinAtar/Breakout-v1"])
def test_hidden_layers_have_no_effect_where_a_cnn_sees_images(env: str) -> None:
    base = recipes.make("dqn", env)
    with pytest.raises(UserError, match=r"algorithm\.hidden has no effect here: .*CNN"):
        settings.refuse_without_effect(override(base, {"algorithm.hidden": (7,)}), base)
    settings.refuse_without_effect(override(base, {"algorithm.hidden": (7,), "algorithm.convnet": "mlp"}), base)


@pytest.mark.parametrize("env", ["CartPole-v1", "ALE/Pong-v5", "MinAtar/Breakout-v1"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_recipe_sets_is_never_refused(recipe: str, env: str) -> None:
    base = recipes.make(recipe, env)
    for values in ({}, {"runtime": "inline"}, {"inference": "central"}, {"learner.optimizer": "adam"}):
        settings.refuse_without_effect(override(base, values), base)


def test_the_settings_that_scopes_name_exist() -> None:
    names = {name for recipe in RECIPES for name in flat(recipes.make(recipe))}
    for scope in settings.SCOPES:
        for own in scope.names:
            assert any(name == own or (own.endswith(".") and name.startswith(own)) for name in names), own


def test_a_config_of_an_older_run_loads_with_the_settings_that_are_gone(tmp_path: Path) -> None:
    config = recipes.make("dqn")
    values = as_plain(config)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values | {"actor": values["actor"] | {"refresh": 1}}))
    assert load_config(file) == config
    file.write_text(yaml.safe_dump(values | {"actor": values["actor"] | {"refresh": 5}}))
    with pytest.raises(UserError, match=r"There is no setting actor\.'refresh'"):
        load_config(file)


def test_a_config_with_a_momentum_loads_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = recipes.make("dqn", "ALE/Pong-v5")
    values, file = as_plain(config), tmp_path / "config.yaml"
    for momentum, warns in ((0.0, False), (0.95, True)):
        file.write_text(yaml.safe_dump(values | {"learner": values["learner"] | {"momentum": momentum}}))
        assert load_config(file) == config
        assert ("learner.momentum is ignored" in caplog.text) is warns
