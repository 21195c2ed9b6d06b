"""Many policies with weights of their own, and the worker that plays their episodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from veldt.acting.population import Population
from veldt.acting.reference import reference_batch
from veldt.acting.worker import LaneRandom, Worker
from veldt.counters import Counters
from veldt.envs import make_env
from veldt.experiment import recipes
from veldt.learning import params
from veldt.learning.evolution import Generation, episode_seed, fill_noise, noise_index
from veldt.records.tree import Array

SEED, TABLE = 4, 50_000


def config_of(env: str, **changes: Any) -> Any:
    return recipes.make("es", env, **{"learner.pairs": 3, "learner.noiseless": 0.0, **changes})


def center_of(config: Any, spec: Any) -> Array:
    torch.manual_seed(0)
    net = config.algorithm.network(spec)
    if net.norm is not None:
        net.norm.mean.normal_(0, 0.3)
        net.norm.variance.uniform_(0.001, 3)
    return params.flatten(net).detach().numpy().copy()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("CartPole-v1", {}),
    ("CartPole-v1", {"algorithm.lstm": 8}),
    ("CartPole-v1", {"algorithm.history": 3, "algorithm.hidden": (64, 32)}),
    ("Pendulum-v1", {"algorithm.bins": 5}),
    ("Pendulum-v1", {"algorithm.hidden": (256, 256)}),
    ("veldt/Catch-v0", {"algorithm.normalize_obs": False}),
    ("MinAtar/Breakout-v1", {"learner.table": TABLE * 10}),
]


@pytest.mark.parametrize(("env", "changes"), KINDS, ids=str)
def test_each_lane_acts_as_a_network_of_its_own(env: str, changes: dict[str, Any]) -> None:
    """The outputs are those of the network with theta + sigma * eps, and the same bits in every lane."""
    config = config_of(env, **changes)
    spec, algorithm, lanes = config.env_spec(), config.algorithm, 5
    population, center = Population(algorithm, spec, lanes), center_of(config, spec)
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((lanes, population.parameters), np.float32)
    noise[3] = noise[1]
    population.share(center)
    reference = None
    if population.net.refers:
        reference = reference_batch(algorithm, spec, config.envs, 8, 1)
    for lane in range(lanes):
        population.perturb(lane, noise[lane], 0.3, reference)
    outs: list[Array] = []
    decide = algorithm.decide
    object.__setattr__(
        algorithm, "decide", lambda net, out, *rest: outs.append(out["out"].copy()) or decide(net, out, *rest)
    )
    envs = config.envs(1)
    record = envs.reset(7)
    for _ in range(6):  # every lane sees the same
        step = {name: np.repeat(x, lanes, 0) for name, x in record.items()}
        action = population.act(step, np.zeros(lanes), LaneRandom(lanes))
        record = envs.step(action[1:2])
    object.__delattr__(algorithm, "decide")
    for lane in range(lanes):
        net = algorithm.network(spec).eval()
        vector = params.flatten(net)
        with torch.no_grad():
            vector.copy_(torch.from_numpy(center))
            vector[: population.parameters] += 0.3 * torch.from_numpy(noise[lane])
        if reference is not None:
            net.refer(reference)
        assert torch.allclose(vector, population.vectors[lane], atol=1e-5)
        if not algorithm.lstm and algorithm.history == 1:
            rows = {name: torch.from_numpy(x[:, None]) for name, x in envs.reset(7).items()}
            with torch.no_grad():
                out, _ = algorithm.forward(net, rows, {})
            assert np.allclose(outs[0][lane], out["out"].numpy()[0], atol=1e-5)
    for out in outs:
        assert out[1].tobytes() == out[3].tobytes() != out[2].tobytes()


class Collector:
    """Stands for the master."""

    def __init__(self, vector: Array, cap: int = 0) -> None:
        self.vector, self.cap = vector, cap
        self.results: dict[int, tuple[Any, ...]] = {}
        self.sums: dict[int, Array] = {}
        self.broken = 0

    def generation(self, have: int = -1) -> Generation | None:
        return None if have == 1 else Generation(1, 0, self.cap, self.vector)

    def result(self, generation: int, pair: int, *found: Any) -> None:
        self.results[pair] = found

    def observations(self, generation: int, pair: int, sums: Array) -> None:
        self.sums[pair] = sums.copy()

    def broken_off(self, steps: int) -> None:
        self.broken += steps


def played(config: Any, lanes: int = 4, index: int = 0, workers: int = 1, cap: int = 0) -> Collector:
    spec = config.env_spec()
    table = np.zeros(config.learner.table, np.float32)
    fill_noise(table, SEED)
    master: Any = Collector(center_of(config, spec), cap)
    envs = partial(make_env, config.env, **config.env_options, separate=True)
    how = (config.learner, config.actor.noise, SEED, index, workers, table)
    worker = Worker(config.algorithm, spec, envs, lanes, master, Counters(), *how)
    while worker.step():
        pass
    worker.close()
    return master  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"actor.noise": 0.1}),
        ("CartPole-v1", {"actor.noise": 0.3}),
        ("MinAtar/Breakout-v1", {"learner.table": TABLE * 10, "learner.pairs": 2, "algorithm.batch_norm": False}),
    ],
    ids=str,
)
def test_results_do_not_depend_on_lanes_or_workers(env: str, changes: dict[str, Any]) -> None:
    config = config_of(env, **changes)
    one = played(config, lanes=1)
    assert sorted(one.results) == list(range(config.learner.pairs))
    for lanes, workers in ((3, 1), (4, 2), (7, 3)):
        found: dict[int, Any] = {}
        for index in range(workers):
            other = played(config, lanes, index, workers)
            assert sorted(other.results) == list(range(index, config.learner.pairs, workers))
            found |= other.results
            for pair, sums in other.sums.items():
                assert sums.tobytes() == one.sums[pair].tobytes()
        assert found == one.results, (lanes, workers)


def test_an_episode_by_hand() -> None:
    """Return, length and observations of pair 2 as a bare loop of environment and network has them."""
    config = config_of("CartPole-v1", **{"learner.pairs": 3})
    spec = config.env_spec()
    found = played(config)
    table, center = np.zeros(config.learner.table, np.float32), center_of(config, spec)
    fill_noise(table, SEED)
    net = config.algorithm.network(spec).eval()
    vector = params.flatten(net)
    size = sum(p.numel() for p in net.parameters())
    at = noise_index(SEED, 0, 2, len(table), size)
    seen, outcome = [], []
    for sign in (1, -1):
        with torch.no_grad():
            vector.copy_(torch.from_numpy(center))
            vector[:size] += sign * config.learner.sigma * torch.from_numpy(table[at : at + size])
        env = make_env("CartPole-v1", 1, separate=True).env.envs[0]  # type: ignore[attr-defined]
        obs, _ = env.reset(seed=episode_seed(config.learner, SEED, 0, 2, sign) % 2**31)
        total, steps, ended = 0.0, 0, False
        while not ended:
            seen.append(obs)
            with torch.no_grad():
                action = int(net.head(net.torso(torch.from_numpy(np.asarray(obs)[None]))).argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            total, steps, ended = total + float(reward), steps + 1, terminated or truncated
        outcome.append((total, steps))
    (plus, plus_steps), (minus, minus_steps) = outcome
    assert found.results[2] == (plus, minus, plus_steps, minus_steps)
    x = np.array(seen, np.float64)
    assert np.allclose(found.sums[2], np.concatenate([[len(x)], x.sum(0), (x**2).sum(0)]))


def test_a_cap_ends_perturbed_episodes_alone() -> None:
    config = config_of("Pendulum-v1", **{"learner.noiseless": 0.5})
    found = played(config, lanes=3, cap=30).results
    assert sorted(found) == [-3, -2, -1, 0, 1, 2]
    assert all(x[2:] == ((200, 0) if pair < 0 else (30, 30)) for pair, x in found.items())


def test_new_weights_break_off_what_runs() -> None:
    config = config_of("Pendulum-v1")
    spec = config.env_spec()
    master: Any = Collector(center_of(config, spec))
    table = np.zeros(config.learner.table, np.float32)
    envs = partial(make_env, config.env, **config.env_options, separate=True)
    worker = Worker(config.algorithm, spec, envs, 4, master, Counters(), config.learner, 0.0, SEED, 0, 1, table)
    for _ in range(11):
        worker.step()
    worker.have = 0  # as if these weights were new
    worker.step()
    assert master.broken == 4 * 10, "the first step resets the environments"
    while worker.step():
        pass
    assert sorted(master.results) == [0, 1, 2]
    worker.close()


def test_the_reference_batch_follows_from_the_seed() -> None:
    config = config_of("MinAtar/Breakout-v1")
    spec = config.env_spec()
    one, again, other = (reference_batch(config.algorithm, spec, config.envs, 12, seed) for seed in (1, 1, 2))
    assert one.shape == (12, 10, 10, 4) and torch.equal(one, again) and not torch.equal(one, other)


def test_virtual_batch_norm_takes_its_statistics_from_the_reference() -> None:
    config = config_of("MinAtar/Breakout-v1")
    spec = config.env_spec()
    net = config.algorithm.network(spec).eval()
    reference = reference_batch(config.algorithm, spec, config.envs, 32, 1)
    net.refer(reference)
    sight: Any = net.torso.sight
    with torch.no_grad():
        x = reference.movedim(-1, 1).float()
        before = sight.conv[0](x)
        assert torch.allclose(sight.conv[1].running_mean, before.mean((0, 2, 3)), atol=1e-5)
        assert torch.allclose(sight.conv[1].running_var, before.transpose(0, 1).flatten(1).var(1), rtol=1e-4)
        alone, batch = net.torso(reference[:1]), net.torso(reference)
    assert torch.allclose(alone, batch[:1], atol=1e-5), "not the statistics of the batch that it acts on"
