"""Every space: what an environment shows and takes, as columns and back, and what is wrong with an environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import examples
from test_envs import BOX, Any_
from test_run import tiny

from veldt.algorithms.dpg import DPG, ActorCritic
from veldt.algorithms.dqn import DQN
from veldt.algorithms.r2d2 import R2D2
from veldt.env_kwargs import as_words, read_kwargs, words_of_text
from veldt.envs import make_env
from veldt.envs.small import Chain
from veldt.errors import UserError
from veldt.experiment.directory import asks
from veldt.experiment.joined import assign, parse
from veldt.experiment.recipes import make
from veldt.nets.torsos import OneHot, torso_for
from veldt.records.adapter import Adapter
from veldt.records.checks import ActionCheck
from veldt.records.step import EnvSpec

TWO = spaces.Discrete(2)


def seen(space: spaces.Space[Any], **settings: Any) -> Adapter:
    return Adapter(space, TWO, "e", **settings)


# Observations.


@pytest.mark.parametrize(
    ("space", "columns"),
    [
        (spaces.Discrete(5, start=2), {"obs": ((), "int16")}),
        (spaces.MultiDiscrete([[3, 400]]), {"obs": ((1, 2), "int16")}),
        (spaces.MultiBinary(3), {"obs": ((3,), "bool")}),
        (spaces.Tuple([BOX, TWO]), {"obs/0": ((3,), "float32"), "obs/1": ((), "int16")}),
        (
            spaces.Dict({"goal": spaces.Dict({"at": BOX}), "said": spaces.Text(9)}),
            {"obs/goal.at": ((3,), "float32")},
        ),
        (spaces.Box(-1, 1, (3,), np.longdouble), {"obs": ((3,), "float32")}),
        (spaces.Box(-1, 1, (3,), np.float16), {"obs": ((3,), "float16")}),
        (spaces.Box(0, 9, (3,), np.uint16), {"obs": ((3,), "int32")}),
        (spaces.Box(0, 1, (48, 64, 3), np.float32), {"obs": ((48, 64, 3), "uint8")}),
        (spaces.Box(0, 1, (10, 10, 4), np.float64), {"obs": ((10, 10, 4), "uint8")}),
    ],
    ids=str,
)
def test_any_space_becomes_columns_that_every_network_takes(space: Any, columns: dict[str, Any]) -> None:
    class Shown(Any_):
        def see(self) -> Any:  # NumPy cannot draw long doubles
            return np.zeros(3, np.longdouble) if space.dtype == np.longdouble else super().see()

    envs = make_env(lambda: Shown(space, TWO), 2)
    assert {name: (c.shape, c.dtype.name) for name, c in envs.spec.observation.items()} == columns
    record = envs.reset(0)
    for _ in range(3):
        record = envs.step(np.zeros(2, np.int64))
    assert envs.bad == 0
    net = DQN().network(envs.spec)
    rows = {name: torch.from_numpy(record[name])[:, None] for name in envs.spec.observation}
    assert DQN().forward(net, rows, {})[0]["q"].shape == (2, 2)


def test_choices_are_recorded_from_zero_and_seen_one_hot() -> None:
    adapter = seen(spaces.Dict({"a": spaces.Discrete(3, start=5), "b": spaces.MultiDiscrete([2, 4], start=[0, -1])}))
    columns = adapter.observation({"a": np.int64(7), "b": np.array([1, -1])})
    assert columns["obs/a"] == 2 and columns["obs/b"].tolist() == [1, 0]
    assert adapter.categories == {"obs/a": (3,), "obs/b": (2, 4)}
    encode = OneHot((2, 4))
    assert encode(torch.tensor([[1, 3], [0, 0]])).tolist() == [[0, 1, 0, 0, 0, 1], [1, 0, 1, 0, 0, 0]]
    assert OneHot((3,), stack=2)(torch.tensor([[0, 9]])).tolist() == [[1, 0, 0, 0, 0, 1]], "no index leaves its choices"


def test_a_choice_that_is_none_is_dropped() -> None:
    class Wrong(Any_):
        def see(self) -> Any:
            return 4 if self.t == 2 else 1

    envs = make_env(lambda: Wrong(spaces.Discrete(3), TWO))
    envs.reset(0)
    valid = [envs.step(np.zeros(1, np.int64))["valid"][0] for _ in range(3)]
    assert valid == [True, False, True] and envs.bad == 1


def test_images_are_resized_by_area_made_grey_and_kept_as_bytes() -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    image[:20] = 200
    first = np.moveaxis(image, -1, 0)
    last = seen(spaces.Box(0, 255, (40, 60, 3), np.uint8), image_size=4, grayscale=True).observation(image)["obs"]
    assert last.dtype == np.uint8 and last.tolist() == [[200] * 4] * 2 + [[0] * 4] * 2
    chw = seen(spaces.Box(0, 255, (3, 40, 60), np.uint8), image_size=4)
    assert chw.columns["obs"].spec.shape == (4, 4, 3)
    assert chw.observation(first)["obs"][..., 1].tolist() == last.tolist()
    batch = chw.observation(np.stack([first, first * 0]))["obs"]
    assert batch.shape == (2, 4, 4, 3) and not batch[1].any(), "batches too"
    floats = seen(spaces.Box(0, 1, (40, 60, 3), np.float32))
    np.testing.assert_array_equal(floats.observation(image / np.float32(255))["obs"], image)
    with pytest.raises(UserError, match="image_size and grayscale are for images"):
        seen(BOX, image_size=84)


@pytest.mark.parametrize(
    ("high", "dtype", "levels"), [(1, np.float32, True), (65_535, np.uint16, True), (255, np.int32, False)]
)
def test_an_image_that_loses_levels_is_told(high: int, dtype: Any, levels: bool) -> None:
    adapter = seen(spaces.Box(0, high, (40, 40, 3), dtype))
    assert adapter.columns["obs"].spec.dtype == np.uint8
    assert any(f"in {np.dtype(dtype)} are kept as bytes (256 levels)" in x for x in adapter.notices) == levels


def test_float_images_of_any_range_get_convolutions_and_tables_do_not() -> None:
    def torso(space: Any) -> str:
        return type(torso_for(EnvSpec.of("e", seen(space)), 1, (), (8,))).__name__

    assert torso(spaces.Box(-np.inf, np.inf, (3, 64, 64), np.float32)) == "NatureCNN"
    assert torso(spaces.Box(0, 1, (64, 64), np.float32)) == "NatureCNN"
    assert torso(spaces.Box(0, 1, (10, 10, 4), np.float32)) == "MinAtarCNN"
    assert torso(spaces.Box(-np.inf, np.inf, (64, 64), np.float32)) == "MLP"


# Actions.


@pytest.mark.parametrize(
    ("space", "recorded", "given", "arrives"),
    [
        (spaces.MultiBinary(3), "MultiDiscrete([2 2 2])", [1, 0, 1], [1, 0, 1]),
        (spaces.Box(-1, 2, (2,), np.int32), "MultiDiscrete([4 4])", [0, 3], [-1, 2]),
        (spaces.Box(-2, 2, (), np.float64), "Box(-2.0, 2.0, (), float64)", 9.0, 2.0),
        (spaces.Box(-1, 1, (2, 2), np.float64), "Box(-1.0, 1.0, (2, 2), float64)", np.eye(2), np.eye(2)),
    ],
    ids=str,
)
def test_any_action_space_is_acted_in(space: Any, recorded: str, given: Any, arrives: Any) -> None:
    envs = make_env(lambda: Any_(BOX, space))
    assert str(envs.spec.action_space) == recorded
    envs.reset(0)
    envs.step(np.array([given], envs.spec.action.dtype))
    assert isinstance(envs.env, SyncVectorEnv)
    np.testing.assert_allclose(envs.env.envs[0].unwrapped.actions[0], arrives)


def test_nested_actions_are_put_together_again() -> None:
    space = spaces.Dict({"a": spaces.Discrete(3, start=1), "b": spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(2)])})
    envs = make_env(lambda: Any_(BOX, space), 2)
    assert str(envs.spec.action_space) == "MultiDiscrete([3 2 2 2])"
    envs.reset(0)
    envs.step(np.array([[2, 1, 0, 1], [0, 0, 0, 0]]))
    assert isinstance(envs.env, SyncVectorEnv)
    found = envs.env.envs[0].unwrapped.actions[0]
    assert found["a"] == 3 and found["b"][0].tolist() == [1, 0] and found["b"][1] == 1


def test_a_box_without_an_axis_arrives_as_an_array_however_deep() -> None:
    space = spaces.Dict({"a": spaces.Tuple([spaces.Box(-1, 1, ())]), "b": spaces.Box(0, 1, (2,))})
    envs = make_env(lambda: Any_(BOX, space), 2)
    envs.reset(0)
    envs.step(np.zeros((2, 3), np.float32))  # it asserts that its space contains the action, which warns of scalars
    assert isinstance(envs.env, SyncVectorEnv)
    assert isinstance(envs.env.envs[0].unwrapped.actions[0]["a"][0], np.ndarray)


def test_a_few_combinations_become_one_choice_and_many_are_sent_to_impala() -> None:
    adapter = Adapter(BOX, spaces.MultiDiscrete([3, 5], start=[0, 10]), "e", combine=True)
    assert adapter.action_space == spaces.Discrete(15) and "one choice of 15" in adapter.notices[0]
    actions = [adapter.action(np.int64(i)).tolist() for i in range(15)]
    assert actions == [[i, 10 + j] for i in range(3) for j in range(5)]
    many = EnvSpec.of("e", Adapter(BOX, spaces.MultiDiscrete([100, 100]), "e", combine=True))
    for algorithm in (DQN(), R2D2()):
        with pytest.raises(UserError, match="10,000 combinations; use impala"):
            algorithm.check(many)
    with pytest.raises(UserError, match="impala takes that"):
        DPG().check(many)


def leaves() -> st.SearchStrategy[spaces.Space[Any]]:
    starts = st.integers(-3, 3)
    return st.one_of(
        st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 4), starts),
        st.builds(lambda n, start: spaces.MultiDiscrete([[n, 2]], start=[[start, 0]]), st.integers(1, 3), starts),
        st.sampled_from([spaces.MultiBinary(2), spaces.Box(3, 5, (), np.uint64), spaces.Box(-1, 1, (2,), np.int8)]),
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    space=st.recursive(
        leaves(),
        lambda part: st.one_of(
            st.dictionaries(st.sampled_from("ab"), part, min_size=1).map(spaces.Dict),
            st.lists(part, min_size=1, max_size=2).map(spaces.Tuple),
        ),
        max_leaves=3,
    ),
    combine=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_action_is_recorded_and_given_back(space: spaces.Space[Any], combine: bool, seed: int) -> None:
    adapter = Adapter(BOX, space, "e", combine=combine)
    space.seed(seed)
    for _ in range(3):
        action = space.sample()
        recorded = adapter.recorded(action)
        assert recorded.shape == adapter.action_column.shape and recorded.dtype == adapter.action_column.dtype
        again = adapter.action(recorded)
        assert space.contains(again)
        np.testing.assert_array_equal(spaces.flatten(space, again), spaces.flatten(space, action))
    assert ActionCheck(EnvSpec.of("e", adapter))({"action": recorded[None]}) == ""


def test_an_action_space_too_large_for_a_network_is_refused() -> None:
    with pytest.raises(UserError, match="e has 1,099,511,627,776 actions; offer at most 1,048,576"):
        Adapter(BOX, spaces.Discrete(2**40), "e")


def test_dqn_trains_with_choices_on_both_sides(tmp_path: Path) -> None:
    env = lambda: Any_(spaces.Tuple([spaces.Discrete(4), BOX]), spaces.MultiBinary(2))  # noqa: E731
    run = tiny(tmp_path / "r", env=env, steps=300)
    assert run.metrics[-1]["learner_steps"] > 0


def test_dpg_sees_images_and_its_policy_leaves_their_convolutions_alone() -> None:
    space = spaces.Dict({"eye": spaces.Box(0, 255, (40, 40, 3), np.uint8), "arm": BOX})
    env = EnvSpec.of("e", Adapter(space, spaces.Box(-1, 1, (2,), np.float32), "e"))
    dpg = DPG(critic=(8,), actor=(8,), normalize_obs=True, twin=True)
    dpg.check(env)
    net = dpg.network(env)
    assert isinstance(net, ActorCritic)
    rows = {"obs/eye": torch.zeros(3, 1, 40, 40, 3, dtype=torch.uint8), "obs/arm": torch.ones(3, 1, 3)}
    out, _ = dpg.act(net.requires_grad_(False), rows, {}, np.zeros(3), np.random.default_rng(0))
    assert out["action"].shape == (3, 2)
    assert any(".conv1." in name and name.startswith("critic.") for name, _ in net.named_parameters())


# What is wrong with an environment.


class Old(Any_):
    """An environment of the old Gym's kind, or with another mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__(BOX, TWO)
        self.mistake = mistake

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        obs, info = super().reset(seed=seed)
        return {"obs alone": obs, "reset shape": (obs[:2], info), "None": None}.get(self.mistake, (obs, info))

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        found: dict[str, Any] = {
            "four": (obs, reward, terminated, info),
            "rewards": (obs, np.ones(2), terminated, truncated, info),
            "text": ("left", reward, terminated, truncated, info),
        }
        return found.get(self.mistake, (obs, reward, terminated, truncated, info))


class NoSeed(Any_):
    def __init__(self) -> None:
        super().__init__(BOX, TWO)

    def reset(self) -> Any:  # type: ignore[override]
        return self.see(), {}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Old("obs alone"), r"reset must return a tuple \(obs, info\).* as old Gym's environments do"),
        (lambda: Old("None"), "it returned None"),
        (lambda: Old("reset shape"), r"observation of reset does not fit its space: space \(3,\), got \(2,\)"),
        (lambda: Old("four"), "not 4 values, as old Gym's environments do"),
        (lambda: gym.wrappers.TimeLimit(Old("four"), 9), "not 4 values, as old Gym's environments do"),
        (lambda: Old("rewards"), r"one number as the reward, not an array \(2,\)"),
        (lambda: Old("text"), "observation of step does not fit its space: the space is of numbers, got a str"),
        (NoSeed, "reset does not take seed"),
        (lambda: gym.make_vec("CartPole-v1", 2), "a vector environment"),
        (lambda: 5, "an int, not a gymnasium.Env"),
    ],
)
def test_a_mistake_of_an_environment_is_one_sentence_at_its_start(make: Any, says: str) -> None:
    def play() -> None:
        envs = make_env(make)
        envs.reset(0)
        envs.step(np.zeros(1, np.int64))

    with pytest.raises(UserError, match=says) as caught:
        play()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "says"), [("pettingzoo", "PettingZoo"), ("gym", "old Gym"), ("envpool", "EnvPool"), ("dm_env", "dm_env")]
)
def test_environments_of_other_interfaces_are_named(package: str, says: str) -> None:
    kind = type("Env", (), {"__module__": f"{package}.core"})
    with pytest.raises(UserError, match=says):
        make_env(kind)


def test_what_a_constructor_raises_is_said_with_its_place_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        UserError, match=r"ZeroDivisionError: integer division or modulo by zero \(test_adapter.py, line \d+\)"
    ):
        make_env(lambda: Chain(1 // 0))
    told = "\n".join(caplog.messages)
    assert "1 // 0" in told and "make.py" not in told, "the environment's own traceback, not ours"


def test_an_argument_that_is_missing_is_asked_for() -> None:
    def made(size: int, noise: float, name: str = "") -> gym.Env[Any, Any]:
        raise AssertionError(size, noise, name)

    with pytest.raises(UserError, match=r"missing 2 required .* --env-kwargs size=\.\.\. noise=\.\.\.\.$"):
        make_env(made)


# Names, arguments and wrappers.


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Meta-World/MT1", "metaworld"),
        ("metaworld:Meta-World/MT1", "needs metaworld; install it with: pip install 'metaworld'"),
        ("procgen-coinrun-v0", "old Gym"),
        ("bsuite/catch-v0", r"shimmy\[bsuite\]"),
    ],
)
def test_well_known_ids_name_their_package(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("metaworld", "shimmy"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=says):
        make_env(name)


def test_a_module_beside_the_user_registers_an_id_or_has_a_callable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_me.py").write_text(
        "import gymnasium\nfrom veldt.envs.small import Chain\n"
        "gymnasium.register('Beside-v0', entry_point=Chain, kwargs={'n': 6})\n"
        "def grow(n=4, wide=False):\n    return Chain(2 * n if wide else n)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [x for x in sys.path if x not in ("", os.getcwd())])
    try:
        assert make_env("beside_me:Beside-v0").spec.observation["obs"].shape == (6,)
        assert make_env("beside_me:Beside-v0", kwargs=("n=3",)).spec.observation["obs"].shape == (3,)
        assert make_env("beside_me:grow", kwargs={"n": 5, "wide": True}).spec.observation["obs"].shape == (10,)
    finally:
        sys.modules.pop("beside_me", None)
        gym.registry.pop("Beside-v0", None)


def test_arguments_are_typed_as_in_yaml() -> None:
    words = ("n=8", "flat=true", "name=abc", "rate=1e-3", "shape=[2, 3]", "none=null", "empty=")
    expected = {"n": 8, "flat": True, "name": "abc", "rate": 1e-3, "shape": [2, 3], "none": None, "empty": ""}
    assert read_kwargs(words) == expected == read_kwargs(as_words(expected))
    assert words_of_text(words) == ["name=abc", "shape=[2, 3]", "empty="]
    for wrong in (("n",), ("=3",), ("a-b=3",), ("n=1", "n=2")):
        with pytest.raises(UserError, match="env_kwargs"):
            read_kwargs(wrong)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=6))
TEXTS = st.sampled_from(["1e-3", "*.png", "&a", "a & b", "1:30", "no", "=", "null", "0x1f", "'q'", "a: b", "a\nb"])


@settings(max_examples=examples(200), deadline=None)
@given(
    st.recursive(
        SCALARS | TEXTS,
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=2),
        max_leaves=5,
    )
)
def test_arguments_become_texts_and_are_read_back(value: Any) -> None:
    found = read_kwargs(as_words({"value": value}))["value"]
    assert found == value and type(found) is type(value)


def test_arguments_that_no_text_can_hold_are_refused_in_words() -> None:
    assert as_words({"n": np.int64(3), "rate": np.float32(0.5)}) == ("n=3", "rate=0.5")
    for wrong in (Path("x"), print, (1, 2)):
        with pytest.raises(UserError, match="env_kwargs must be numbers, booleans, texts"):
            as_words({"value": wrong})


def test_wrappers_are_applied_in_order_and_kept_in_the_config(tmp_path: Path) -> None:
    wrappers = [gym.wrappers.FlattenObservation, "gymnasium.wrappers:NormalizeReward"]
    run = tiny(tmp_path / "r", env="veldt/Chain-v0", env_kwargs={"n": 5}, wrappers=wrappers, steps=200)
    config = run.config
    assert config.env_kwargs == ("n=5",) and config.wrappers[1] == "gymnasium.wrappers:NormalizeReward"
    assert config.env_spec().observation["obs"].shape == (5,)
    assert run.evaluate(1).mean_length > 0
    assert "wrappers" in asks(config) and "env_kwargs" not in asks(config), "numbers are no code"
    envs = config.envs()
    assert isinstance(envs.env, SyncVectorEnv)
    assert [type(x).__name__ for x in (envs.env.envs[0].env, envs.env.envs[0].env.env)] == [  # type: ignore[attr-defined]
        "NormalizeReward",
        "FlattenObservation",
    ]


@pytest.mark.parametrize("recipe", ["apex-dqn", "seed-vtrace"])
def test_an_actor_that_joins_gets_no_wrapper_or_text_that_it_did_not_allow(recipe: str) -> None:
    wrapper, text = "gymnasium.wrappers:FlattenObservation", "render_mode=human"
    config = make(recipe, "CartPole-v1", env_kwargs=("sutton_barto_reward=true", text), wrappers=(wrapper,))
    sent = assign(config, 0)
    with pytest.raises(UserError, match="--wrappers gymnasium"):
        parse(sent, kwargs=(text,))
    with pytest.raises(UserError, match="--env-kwargs"):
        parse(sent, wrappers=(wrapper,))
    allowed = parse(sent, wrappers=(wrapper,), kwargs=(text,))
    assert allowed.imports == {wrapper}
