"""Action masks: read in every form, recorded, honoured when acting, and never bootstrapped over. `Cards` raises where an
illegal action reaches it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from oracles import chi_square
from test_run import tiny
from torch import nn

import veldt
from veldt.__main__ import main
from veldt.acting.actor import Actor
from veldt.acting.exploration import HeldRandom
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.algorithms.a3c import A3C
from veldt.algorithms.base import Batch, among_legal
from veldt.algorithms.dqn import DQN, epsilon_greedy
from veldt.algorithms.r2d2 import R2D2, RecurrentQ
from veldt.algorithms.vtrace import PolicyAndValue, VTraceActorCritic
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.envs.small import Cards
from veldt.errors import EnvError, UserError
from veldt.learning.distributions import Categories
from veldt.learning.params import LatestParams
from veldt.learning.returns import unrescale
from veldt.nets.networks import Rows
from veldt.records.block import Schema
from veldt.records.masks import Masks
from veldt.storing.limiters import MinSize
from veldt.storing.replay import Replay
from veldt.storing.selectors import Uniform

CPU = torch.device("cpu")
BOX = spaces.Box(-1, 1, (2,), np.float32)
INF = float("inf")


class Says(gym.Env[Any, Any]):
    """Its masks are those given, one after another, the first at the reset; None: the info has none. Episodes have three
    steps. It remembers its actions."""

    def __init__(self, masks: Any, action: Any = None) -> None:
        self.observation_space, self.action_space = BOX, action or spaces.Discrete(3)
        self.masks, self.t, self.taken = masks, 0, []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), self._info()

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t == 3, False, self._info()

    def _info(self) -> dict[str, Any]:
        mask = self.masks[self.t % len(self.masks)]
        return {} if mask is None else {"action_mask": mask}


# Reading


def test_a_mask_is_an_array_or_has_the_structure_of_the_action() -> None:
    masks = Masks([("a",), ("b", 0)], np.array([2, 3]), False)
    row = [True, False, False, True, True]
    one, two = np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8)
    for mask in (np.array(row), [1, 0, 0, 1, 1], (one, two), {"a": one, "b": [two]}):
        assert masks.read(mask).tolist() == row
    many = masks.read({"a": np.stack([one] * 4), "b": (np.stack([two] * 4),)}, 4)
    assert many.tolist() == [row] * 4
    for wrong, why in ((np.ones(4), "4 elements, but there are 5"), ("all", "not an array"), ({"a": one}, "has no b")):
        with pytest.raises(ValueError, match=why):
            masks.read(wrong)


def test_a_combination_is_legal_if_each_choice_is() -> None:
    sizes = (2, 3, 2)
    masks, rng = Masks([(0,), (1,), (2,)], np.array(sizes), True), np.random.default_rng(0)
    for _ in range(20):
        parts = [rng.random(n) < 0.6 for n in sizes]
        expected = [all(parts[i][x] for i, x in enumerate(taken)) for taken in itertools.product(*map(range, sizes))]
        assert masks.read(tuple(parts)).tolist() == expected


@pytest.mark.parametrize("combined", [False, True])
def test_which_actions_a_mask_allows(combined: bool) -> None:
    masks = Masks([(0,), (1,)], np.array([2, 2]), combined)
    rows = np.stack([masks.read(np.array(x)) for x in ([1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 0])])
    assert masks.has_choice(rows).tolist() == [True, False, True]
    for row, (a, b) in itertools.product(range(3), itertools.product(range(2), range(2))):
        taken = np.array([2 * a + b]) if combined else np.array([[a, b]])
        legal = [a == 0 and b == 1, True, b == 0][row]
        if row == 1 and not combined:
            legal = True  # of the first choice nothing is legal, and of the second all
        assert masks.allows(rows[[row]], taken).item() == legal


@pytest.mark.parametrize("dict", [False, True])
def test_the_mask_is_a_column_of_the_records_and_no_network_sees_it(dict: bool) -> None:
    envs = make_env("veldt/Cards-v0", 2, kwargs={"n": 3, "dict": dict})
    assert envs.spec.mask == 3 and envs.spec.step["action_mask"].shape == (3,)
    assert list(envs.spec.observation) == (["obs/cards"] if dict else ["obs"])
    assert "actions are masked" in " ".join(envs.spec.notices)
    record = envs.reset(0)
    assert record["action_mask"].tolist() == [[True] * 3] * 2
    record = envs.step(np.array([0, 2]))
    assert record["action_mask"].tolist() == [[False, True, True], [True, True, False]]
    envs.step(np.array([1, 0]))
    record = envs.step(np.array([2, 1]))
    assert record["last"].all() and record["valid"].all() and record["action_mask"].all(), "no card is left at the end"
    assert envs.step(np.array([0, 0]))["first"].all()


def test_masks_can_be_ignored() -> None:
    envs = make_env("veldt/Cards-v0", kwargs={"dict": True}, action_masks=False)
    assert envs.spec.mask == 0 and list(envs.spec.observation) == ["obs/cards", "obs/action_mask"]
    assert make_env(Cards, action_masks=False).spec.mask == 0


def test_an_info_without_a_mask_masks_nothing_and_a_mask_without_actions_is_bad_data() -> None:
    envs = make_env(lambda: Says([[0, 1, 1], None, [0, 0, 0], [0, 0, 0]]))
    assert envs.reset(0)["action_mask"].tolist() == [[False, True, True]]
    assert envs.step(np.array([1]))["action_mask"].all()
    record = envs.step(np.array([1]))
    assert record["action_mask"].all() and not record["valid"][0] and envs.bad == 1
    record = envs.step(np.array([1]))
    assert record["last"][0] and record["valid"][0] and envs.bad == 1


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (lambda: Says([[1, 0]]), r"info\['action_mask'\] does not fit its actions: it has 2 elements, but there are 3"),
        (lambda: Says(["all"]), r"info\['action_mask'\] does not fit its actions: it is 'all', not an array"),
        (
            lambda: Says([[1, 0]], spaces.Box(-1, 1, (2,))),
            "action masks, but its actions are continuous.*--no-action-masks",
        ),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_before_anything_runs(env: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        make_env(env)


def test_an_algorithm_that_does_not_know_masks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DQN, "masks", False)
    with pytest.raises(UserError, match=r"has action masks, which dqn does not honour .*--no-action-masks ignores them"):
        tiny(tmp_path / "run", env="veldt/Cards-v0")
    with pytest.raises(EnvError, match="was played"):
        tiny(tmp_path / "ignored", env="veldt/Cards-v0", action_masks=False)


# Acting


def test_random_actions_are_uniform_over_the_legal_ones() -> None:
    n = 3_000
    q = np.tile(np.array([5, -INF, 1, -INF, 2], np.float32), (n, 1))
    taken = epsilon_greedy(q, np.ones(n), np.random.default_rng(0))["action"]
    counts = np.bincount(taken, minlength=5)
    assert counts[[1, 3]].sum() == 0 and chi_square(counts[[0, 2, 4]], np.full(3, n / 3)) > 1e-3


def test_the_best_action_is_a_legal_one_whatever_the_values() -> None:
    q = np.array([[-INF, -INF, -7], [9, -INF, 3], [-INF, np.nan, -INF], [-INF] * 3], np.float32)
    out = epsilon_greedy(q, np.zeros(4), np.random.default_rng(0))
    assert out["action"][:3].tolist() == [2, 0, 1] and out["q"][:2].tolist() == out["v"][:2].tolist() == [-7, 9]
    assert 0 <= epsilon_greedy(q, np.ones(4), np.random.default_rng(0))["action"][3] < 3


def test_held_random_actions_are_legal_when_the_mask_changes() -> None:
    rng = np.random.default_rng(0)
    held = HeldRandom(rng, 8, longest=16)
    for _ in range(300):
        held.begin(np.arange(8))
        legal = rng.random((8, 4)) < 0.5
        legal[:, 0] |= ~legal.any(1)
        q = np.where(legal, 0, -INF).astype(np.float32)
        taken = epsilon_greedy(q, np.ones(8), held)["action"]
        assert legal[np.arange(8), taken].all()


def test_rows_without_a_legal_action_stay_as_they_are() -> None:
    q, legal = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, False], [False, False]])
    assert among_legal(q, legal).tolist() == [[1.0, -INF], [3.0, 4.0]] and among_legal(q, None) is q


@pytest.mark.parametrize("choices", [[3], [2, 3]])
def test_a_masked_policy_is_the_policy_given_that_the_action_is_legal(choices: list[int]) -> None:
    policy, size = Categories(np.array(choices), () if len(choices) == 1 else (2,)), sum(choices)
    raw = torch.randn(64, size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    legal = torch.rand(64, size, generator=torch.Generator().manual_seed(1)) < 0.5
    masked = policy.among(policy.normalize(raw), legal)
    p = torch.exp(policy.normalize(raw.detach()))
    for row, edges in itertools.product(range(64), zip(np.cumsum([0, *choices[:-1]]), np.cumsum(choices), strict=True)):
        part = slice(*map(int, edges))
        may = legal[row, part] if legal[row, part].any() else torch.ones_like(legal[row, part])
        expected = p[row, part] * may / (p[row, part] * may).sum()
        np.testing.assert_allclose(masked[row, part].detach().exp(), expected, rtol=1e-4, atol=1e-6)
    (policy.entropy(masked) + policy.kl(masked, masked)).sum().backward()
    assert raw.grad is not None and torch.isfinite(raw.grad).all()
    drawn = policy.draw(masked.detach().numpy(), np.ones(64), np.random.default_rng(0))["action"]
    allowed = Masks([(i,) for i in range(len(choices))], np.array(choices), False).allows(legal.numpy(), drawn)
    assert allowed.all()


ALGORITHMS: dict[str, Any] = {
    "dqn": DQN(hidden=(8,)),
    "dqn, history": DQN(hidden=(8,), history=3, n=2),
    "r2d2": R2D2(hidden=(8,), lstm=4, head=0, burn_in=2, length=4, stride=2, n=2),
    "vtrace": VTraceActorCritic(hidden=(8,), unroll=4),
    "vtrace, lstm": VTraceActorCritic(hidden=(8,), unroll=4, lstm=4),
}


@pytest.mark.parametrize("explore", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_illegal_action_reaches_the_environment_and_masks_are_stored(name: str, central: bool, explore: float) -> None:
    algorithm, n = ALGORITHMS[name], 3
    envs = make_env("veldt/Cards-v0", n, kwargs={"dict": central})
    spec, counters = envs.spec, Counters()
    schema = Schema(
        {**spec.step, "action": spec.action, **algorithm.extras(spec)}, algorithm.window, 8, algorithm.state(spec)
    )
    store = Replay(schema, Uniform(200 * schema.starts), MinSize(1), 200 * schema.starts, 200)
    how: Any = (algorithm, spec, LatestParams(), counters, lambda steps: explore, 1)
    policy = BatchedPolicy(*how, hold=4, groups=1, n=n, batch=n, wait=0.0) if central else LocalPolicy(*how, hold=4)
    if isinstance(policy, BatchedPolicy) and explore == 0.5:
        policy.use_graphs()  # what a GPU captures
    recorder = Recorder(policy, store, algorithm, schema)
    actor = Actor(lambda n: envs, n, recorder, counters, seed=0)
    while counters.get("env_steps") < 300:
        actor.step()
    sample = store.sample(64)
    assert sample is not None
    columns = sample.rows
    acts = columns["valid"] & ~columns["last"]
    taken = np.take_along_axis(columns["action_mask"], columns["action"][..., None], -1)[..., 0]
    assert acts.any() and taken[acts].all() and not columns["action_mask"][acts].all()


# Bootstraps


class Table(nn.Module):
    """Q(s, .) is row s of a table; the observation is the number s."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.tensor(rows, dtype=torch.float32))

    def forward(self, obs: Any) -> Any:
        return self.q[obs.reshape(-1).long()]


def windows(on_device: bool, **columns: Any) -> Batch:
    """[B, T]; by default nothing ends and all is valid."""
    host: dict[str, Any] = {name: np.array(x) for name, x in columns.items()}
    shape = host["reward"].shape
    for name, dtype, value in (("discount", np.float32, 1), ("first", bool, 0), ("last", bool, 0), ("valid", bool, 1)):
        host.setdefault(name, np.full(shape, value, dtype))
    host["reward"], host["discount"] = host["reward"].astype(np.float32), host["discount"].astype(np.float32)
    if on_device:
        host = {name: torch.from_numpy(x) for name, x in host.items()}
    return Batch(host, {}, np.ones(shape[0], np.float32), CPU)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("truncated", [0, 1])
def test_dqn_bootstraps_with_the_best_legal_action_of_the_row_that_it_bootstraps_at(
    double: bool, on_device: bool, truncated: int
) -> None:
    """Illegal actions have the largest values, and each row another mask."""
    online = [[0, 0, 0], [1, 90, 5], [90, 2, 8], [0, 0, 0]]
    target = [[0, 0, 0], [3, 70, 4], [70, 6, 5], [0, 0, 0]]
    masks = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 0]]  # the last row is padding
    last = [0, truncated, 0, 0]
    batch = windows(
        on_device,
        obs=np.array([[0, 1, 2, 3]], np.float32),
        reward=[[0, 1, 2, 0]],
        action=[[0, 0, 0, 0]],
        last=np.array([last], bool),
        action_mask=np.array([masks], bool),
    )
    dqn = DQN(gamma=0.5, n=2, double=double, huber=False)
    m = 1 if truncated else 2
    legal = [a for a in range(3) if masks[m][a]]
    chosen = max(legal, key=lambda a: (online if double else target)[m][a])
    expected = (1 if truncated else 1 + 0.5 * 2) + 0.5**m * target[m][chosen]
    loss = dqn.loss(Table(online), Table(target), batch)
    assert loss.priorities.tolist() == [expected] and torch.isfinite(loss.losses[""])


@pytest.mark.parametrize("on_device", [False, True])
def test_dqn_where_an_episode_ends_needs_no_legal_action(on_device: bool) -> None:
    batch = windows(
        on_device,
        obs=np.array([[0, 1]], np.float32),
        reward=[[0, 3]],
        action=[[0, 0]],
        discount=[[1, 0]],
        last=np.array([[0, 1]], bool),
        action_mask=np.array([[[1, 0], [0, 0]]], bool),
    )
    loss = DQN(gamma=0.5).loss(Table([[1, 9], [5, 9]]), Table([[1, 9], [5, 9]]), batch)
    assert loss.priorities.tolist() == [2.0]


def test_r2d2_bootstraps_with_the_online_networks_best_legal_action() -> None:
    torch.manual_seed(0)
    r2d2 = R2D2(gamma=0.9, n=1, burn_in=0, length=3, stride=3, lstm=4, hidden=(4,), head=0, rescaling=True)
    spec = make_env(lambda: Says([[1, 1, 1]])).spec
    net, target = r2d2.network(spec), r2d2.network(spec)
    assert isinstance(net, RecurrentQ) and isinstance(target, RecurrentQ)
    rng = np.random.default_rng(0)
    masks = rng.random((5, 4, 3)) < 0.5
    masks[..., 0] |= ~masks.any(-1)
    batch = windows(
        False,
        obs=rng.standard_normal((5, 4, 2)).astype(np.float32),
        reward=rng.standard_normal((5, 4)),
        action=rng.integers(0, 3, (5, 4)),
        action_mask=masks,
    )
    state = {name: torch.zeros(5, *c.shape) for name, c in r2d2.state(spec).items()}
    batch._host_starts = {name: x.numpy() for name, x in state.items()}
    loss = r2d2.loss(net, target, batch)
    with torch.no_grad():
        rows = r2d2.sequence(net, batch, state)
        q, q_target = net(rows, state), target(rows, state)
    td = np.zeros((5, 3))
    for b, t in np.ndindex(5, 3):
        best = max(np.flatnonzero(masks[b, t + 1]), key=lambda a: q[b, t + 1, a].item())
        v = unrescale(q_target[b, t + 1, best].item() * np.ones(1), r2d2.h_epsilon).item()
        y = r2d2.h(np.array([batch.host["reward"][b, t + 1] + 0.9 * v])).item()
        td[b, t] = abs(y - q[b, t, batch.host["action"][b, t]].item())
    np.testing.assert_allclose(loss.priorities, 0.9 * td.max(1) + 0.1 * td.mean(1), rtol=1e-4)
    unmasked = r2d2.loss(net, target, windows_without(batch, state))
    assert not torch.allclose(loss.priorities, unmasked.priorities), "the masks matter here"


def windows_without(batch: Batch, state: Any) -> Batch:
    columns = {name: x for name, x in batch.host.items() if name != "action_mask"}
    return Batch(columns, {name: x.numpy() for name, x in state.items()}, np.ones(5, np.float32), CPU)


@pytest.mark.parametrize("on_device", [False, True])
def test_vtrace_compares_masked_policies_and_moves_no_illegal_action(on_device: bool) -> None:
    """Acting with the learner's own weights all ratios are 1, which they would not be if one of both were not masked."""
    torch.manual_seed(0)
    vtrace = VTraceActorCritic(unroll=3, hidden=(4,), entropy_cost=0.1)
    spec = make_env(lambda: Says([[1, 1, 1]])).spec
    net = vtrace.network(spec)
    assert isinstance(net, PolicyAndValue)
    rng = np.random.default_rng(0)
    masks = rng.random((6, 4, 3)) < 0.5
    masks[..., 1] = False
    masks[..., 0] |= ~masks.any(-1)
    obs = rng.standard_normal((6, 4, 2)).astype(np.float32)
    with torch.no_grad():
        rows = [{"obs": torch.from_numpy(obs[:, [t]]), "action_mask": torch.from_numpy(masks[:, [t]])} for t in range(4)]
        out = [vtrace.act(net, row, {}, np.ones(6), rng)[0] for row in rows]
    logits, action = (np.stack([x[name] for x in out], 1) for name in ("logits", "action"))
    batch = windows(on_device, obs=obs, reward=np.ones((6, 4)), action=action, logits=logits, action_mask=masks)
    loss = vtrace.loss(net, net, batch)
    loss.losses[""].backward()
    assert loss.metrics["ratio_clipped"] == 0 and loss.metrics["kl"].abs() < 1e-6
    with torch.no_grad():
        raw = net(Rows(torch.from_numpy(obs), torch.zeros(6, 4), torch.zeros(6, 4), None), {})[0][:, :-1]
    p = np.where(masks[:, :-1], np.exp(raw.numpy()), 0)
    p /= p.sum(-1, keepdims=True)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), -1).mean()
    assert loss.metrics["entropy"].item() == pytest.approx(entropy, rel=1e-4)
    assert net.head.weight.grad is not None and torch.isfinite(net.head.weight.grad).all()
    never, sometimes = net.head.weight.grad[1].abs().max(), net.head.weight.grad[0].abs().max()
    assert never < 1e-6 and sometimes > 1e-3, "action 1 is never legal"


def test_a3c_moves_no_illegal_action() -> None:
    torch.manual_seed(0)
    a3c, rng = A3C(unroll=3, hidden=(4,), entropy_cost=0.1), np.random.default_rng(0)
    net = a3c.network(make_env(lambda: Says([[1, 1, 1]])).spec)
    masks = np.tile([True, False, True], (6, 4, 1))
    obs, action = rng.standard_normal((6, 4, 2)).astype(np.float32), rng.choice([0, 2], (6, 4))
    for given, moved in ({"action_mask": masks}, False), ({}, True):
        net.zero_grad()
        a3c.loss(net, net, windows(False, obs=obs, reward=np.ones((6, 4)), action=action, **given)).losses[""].backward()
        gradient = net.head.weight.grad
        assert bool(gradient[1].abs().max() > 1e-6) == moved and gradient[0].abs().max() > 1e-3


# Whole runs


@pytest.mark.parametrize("dict", [False, True])
def test_a_worker_with_one_environment_takes_legal_actions_alone(dict: bool, tmp_path: Path) -> None:
    """Cards raises where an illegal action reaches it. The environment of a worker is in no vector of Gymnasium's."""
    how: Any = {"env": "veldt/Cards-v0", "env_kwargs": (f"dict={str(dict).lower()}",), "runtime": "inline", "workers": 2}
    run = veldt.train("a3c", run=tmp_path, quiet=True, steps=400, **how, **{"eval.episodes": 2})
    assert run.metrics[-1]["env_steps"] >= 400 and run.metrics[-1]["bad_observations"] == 0


@pytest.mark.parametrize("recipe", ["dqn", "impala"])
def test_a_policy_in_the_hand_takes_legal_actions_alone(recipe: str, tmp_path: Path) -> None:
    few: Any = {"runtime": "inline", "steps": 200, "eval.every": 0}
    run = veldt.train(recipe, "veldt/Cards-v0", tmp_path / "run", quiet=True, **few)
    assert run.evaluate(4).lengths == [5] * 4
    policy = veldt.load(run.path)
    obs = np.linspace(0, 1, 5, dtype=np.float32)
    with pytest.raises(UserError, match=r"give action_mask=info\['action_mask'\]"):
        policy(obs)
    with pytest.raises(UserError, match=r"no action_mask of .*: it has 3 elements, but there are 5"):
        policy(obs, action_mask=[1, 0, 0])
    for only in range(5):
        mask = np.arange(5) == only
        assert policy(obs, action_mask=mask)[0] == policy.predict(obs, action_masks=mask, deterministic=False)[0] == only
        batch, _ = policy(np.stack([obs, obs]), action_mask=np.stack([mask, ~mask]), explore=1.0)
        assert batch[0] == only != batch[1]
    if recipe == "dqn":
        q = policy.q(obs, action_mask=[1, 0, 1, 0, 1])
        assert np.isneginf(q[[1, 3]]).all() and np.isfinite(q[::2]).all()
        assert policy.value(obs, action_mask=[1, 0, 1, 0, 1]) == q.max()
    with pytest.raises(UserError, match="it has no action masks, but the run has action masks of 5 elements"):
        run.policy(env=make_env("veldt/Cards-v0", action_masks=False).spec)


def test_a_mask_of_a_dict_observation_comes_with_it(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", "veldt/Cards-v0", env_kwargs=("dict=true",))
    policy = veldt.load(run.path)
    obs = {"cards": np.linspace(0, 1, 5, dtype=np.float32), "action_mask": np.array([0, 0, 0, 1, 0], np.int8)}
    assert policy(obs)[0] == 3 == policy(obs, explore=1.0)[0]


def said() -> Says:
    return Says([[0, 1, 1]])


def test_a_run_from_before_there_were_masks_can_be_evaluated(tmp_path: Path) -> None:
    run = tiny(tmp_path / "run", said, action_masks=False)
    config = run.path / "config.yaml"
    text = config.read_text()
    assert "action_masks: false\n" in text
    config.write_text(text.replace("action_masks: false\n", ""))
    assert run.evaluate(2).lengths == [3, 3]
    with pytest.raises(UserError, match="it has action masks of 3 elements, but the run has no action masks"):
        run.policy(env=said)


def lowest(env: Any) -> Any:
    return lambda obs: int(np.argmin(np.where(env.unwrapped.left, obs, np.inf)))


def forgetful(env: Any) -> Any:
    return lambda obs: int(np.argmin(obs))


def test_demonstrations_have_masks_and_an_illegal_action_of_an_expert_is_named(tmp_path: Path) -> None:
    demos = tmp_path / "demos"
    words = ["record", "--env", "veldt/Cards-v0", "--episodes", "4", "--quiet"]
    assert main([*words, "--policy", "test_masks:lowest", "-o", str(demos)]) == 0
    found = veldt.demos.set.Demos.open(demos)
    episode = next(found.episodes())
    assert found.returns.tolist() == [5.0] * 4 and episode["action_mask"][:-1].sum(1).tolist() == [5, 4, 3, 2, 1]
    found.check(make_env("veldt/Cards-v0").spec)
    with pytest.raises(UserError, match=r"action_mask is .* there and missing here"):
        found.check(make_env("veldt/Cards-v0", action_masks=False).spec)
    assert main([*words, "--policy", "test_masks:forgetful", "-o", str(tmp_path / "bad")]) == 2


def test_masks_reach_actors_in_processes_under_central_inference(tmp_path: Path) -> None:
    run = veldt.train(
        "seed-vtrace", "veldt/Cards-v0", tmp_path / "run", quiet=True, steps=2_000, actors=1, envs_per_actor=4,
        **{"eval.every": 0},
    )  # fmt: skip
    assert run.metrics[-1]["env_steps"] >= 2_000
