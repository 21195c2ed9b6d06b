"""The mixture of a run's own store and one of demonstrations: which items come from where, and that each stays there."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invariants import check_valid
from oracles import chi_square, make_block
from test_cli import refused
from test_demos import at_random, balance, catch, recorded
from test_run import flags, tiny
from test_store import COLUMNS, SCHEMA, STATE, WINDOW, everything

import veldt
from veldt.__main__ import main
from veldt.demos.set import Demos
from veldt.envs import make_env
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.config import Config
from veldt.experiment.directory import load_config
from veldt.nets.networks import TAKEN
from veldt.ports import Source
from veldt.storing.limiters import Limiter, MinSize, SamplesPerInsert
from veldt.storing.replay import Mixture, Replay
from veldt.storing.ring import COUNTS
from veldt.storing.selectors import FLOOR, Prioritized, Uniform
from veldt.storing.slots import PrivateMemory
from veldt.storing.store import Sample
from veldt.topologies.stores import store_builder

Captured = pytest.CaptureFixture[str]
S = SCHEMA.starts
OWN, THEIRS = 3, 8  # the channels that the blocks of the two stores name; `make_block` writes them into every number
OWN_BLOCKS, THEIR_BLOCKS = 10, 6
ALPHA, BETA = 0.6, 0.4


def fill(store: Replay | Mixture, actor: int, blocks: int, first: int = 0) -> None:
    """Some starts are no items, and all priorities are different."""
    rng = np.random.default_rng(actor)
    for sequence in range(first, first + blocks):
        items = [s != sequence % S for s in range(S)]
        assert store.insert(make_block(SCHEMA, Source(actor, sequence), items), rng.random(S) + 0.1)


def make_mixture(
    ratio: float,
    selector: Any = None,
    limiter: Limiter | None = None,
    blocks: int = OWN_BLOCKS,
    seed: int = 5,
    **options: Any,
) -> Mixture:
    make = selector or functools.partial(Prioritized, alpha=ALPHA, beta=BETA)
    demos = Replay(SCHEMA, make(THEIR_BLOCKS * S), MinSize(), THEIR_BLOCKS * S, THEIR_BLOCKS, seed=seed + 1)
    fill(demos, THEIRS, THEIR_BLOCKS)
    own = (SCHEMA, make(12 * S), limiter or MinSize(1), 12 * S, 12)
    mixture = Mixture(demos, ratio, *own, seed=seed, **options)
    fill(mixture, OWN, blocks)
    return mixture


def drawn(mixture: Mixture, n: int) -> Sample:
    sample = mixture.sample(n)
    assert sample is not None
    return sample


def check_origin(mixture: Mixture, sample: Sample) -> None:
    """Every number of every item is that of the block which its key names, in the store which its key names."""
    assert len(sample.keys) == len(sample.weights) == len(sample.probability)
    assert COLUMNS.keys() <= sample.rows.keys() and sample.starts.keys() == STATE.keys()
    for i, key in enumerate(sample.keys.tolist()):
        actor, store = (OWN, mixture) if key >= 0 else (THEIRS, mixture.demos)
        serial, offset = divmod(key if key >= 0 else -1 - key, S)
        block = make_block(SCHEMA, Source(actor, serial), [s != serial % S for s in range(S)])
        assert block.items[offset], "only items are drawn"
        rows = slice(offset * WINDOW.stride, offset * WINDOW.stride + WINDOW.rows)
        for name, column in block.columns().items():
            assert (sample.rows[name][i] == column[rows]).all(), (name, key)
        for name in STATE:
            assert (sample.starts[name][i] == SCHEMA.start_layout.columns(block.starts)[name][offset]).all(), (name, key)
        mass = store.selector.save()[:-1]
        assert sample.probability[i] == pytest.approx(mass[serial % store.n_slots * S + offset] / mass.sum(), rel=1e-9)


# What is drawn.


@pytest.mark.parametrize("ratio", [0.0, 1 / 64, 1 / 4, 1.0])
def test_each_item_is_a_demonstration_with_that_probability_on_its_own(ratio: float) -> None:
    mixture, n, batches = make_mixture(ratio), 16, 4_000
    theirs = np.array([drawn(mixture, n).keys < 0 for _ in range(batches)])  # [batches, n]
    if ratio in (0.0, 1.0):
        assert (theirs == bool(ratio)).all()
        return
    counts, sd = theirs.sum(1), math.sqrt(ratio * (1 - ratio))
    assert abs(theirs.mean() - ratio) < 4 * sd / math.sqrt(theirs.size)
    assert (abs(theirs.mean(0) - ratio) < 4.5 * sd / math.sqrt(batches)).all(), "whatever its place in the batch"
    binomial = np.array([math.comb(n, k) * ratio**k * (1 - ratio) ** (n - k) for k in range(n + 1)])
    classes = np.minimum(np.arange(n + 1), np.flatnonzero(binomial * batches > 8).max())  # the largest counts are one
    expected, observed = (np.bincount(classes, x) for x in (binomial * batches, np.bincount(counts, minlength=n + 1)))
    assert len(expected) > 2 and chi_square(observed, expected) > 1e-3, (observed, expected)
    if ratio < 0.1:
        assert 0.7 < (counts == 0).mean() < 0.85, "most batches have none"
    pairs = np.mean(theirs[:, :-1] & theirs[:, 1:])
    assert pairs == pytest.approx(ratio**2, abs=5 * ratio / math.sqrt(theirs.size)), "neighbours know nothing of each other"


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("selector", [None, Uniform])
def test_every_item_is_that_of_the_block_which_its_key_names(ratio: float, selector: Any) -> None:
    mixture, seen = make_mixture(ratio, selector), set()
    for n in (1, 2, 7, 32, 100):
        for _ in range(10):
            sample = drawn(mixture, n)
            assert len(sample.keys) == n
            check_origin(mixture, sample)
            seen |= set(sample.keys.tolist())
    own = OWN_BLOCKS * (S - 1) if ratio < 1 else 0
    theirs = THEIR_BLOCKS * (S - 1) if ratio > 0 else 0
    assert sum(key >= 0 for key in seen) == own and sum(key < 0 for key in seen) == theirs, "all items are drawn"


def test_within_each_store_items_are_drawn_by_their_own_priorities() -> None:
    mixture = make_mixture(0.3)
    found = np.concatenate([drawn(mixture, 50).keys for _ in range(800)])
    for store, keys in ((mixture, found[found >= 0]), (mixture.demos, -1 - found[found < 0])):
        mass = store.selector.save()[:-1]
        items = np.flatnonzero(mass)
        observed = np.bincount(keys, minlength=len(mass))[items]
        # Draws are stratified, so counts vary less than those of independent ones.
        assert chi_square(observed, len(keys) * mass[items] / mass.sum()) > 1e-3
        assert observed.sum() == len(keys)


# Weights.


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_importance_weights_are_their_definition(ratio: float) -> None:
    mixture = make_mixture(ratio)
    own, theirs = mixture.selector.save()[:-1], mixture.demos.selector.save()[:-1]
    sizes = (own > 0).sum(), (theirs > 0).sum()
    assert sizes == (mixture.size, mixture.demos.size) and sizes[0] != sizes[1]
    for _ in range(20):
        sample = drawn(mixture, 40)
        raw = []
        for key in sample.keys.tolist():
            mass, size = (own, sizes[0]) if key >= 0 else (theirs, sizes[1])
            p = mass[key if key >= 0 else -1 - key] / mass.sum()  # no block has left a slot: a key is its leaf
            raw.append((size * p) ** -BETA)
        np.testing.assert_allclose(sample.weights, np.array(raw) / max(raw), rtol=1e-6)
        assert sample.weights.dtype == np.float32 and sample.weights.max() == 1
    if ratio == 0.3:
        assert len({key >= 0 for key in sample.keys.tolist()}) == 2


def test_without_priorities_all_weights_are_one() -> None:
    assert (drawn(make_mixture(0.3, Uniform), 64).weights == 1).all()


# Priorities.


def test_priorities_go_back_to_where_the_item_came_from() -> None:
    mixture, rng = make_mixture(0.4), np.random.default_rng(0)
    for _ in range(30):
        sample = drawn(mixture, 12)
        priorities = rng.random(12) * 3
        expected = {True: mixture.selector.save()[:-1], False: mixture.demos.selector.save()[:-1]}
        for key, priority in zip(sample.keys.tolist(), priorities.tolist(), strict=True):
            expected[key >= 0][key if key >= 0 else -1 - key] = max(priority, FLOOR) ** ALPHA
        mixture.update(sample.keys, priorities)
        for own, store in ((True, mixture), (False, mixture.demos)):
            np.testing.assert_allclose(store.selector.save()[:-1], expected[own], rtol=1e-12)
        check_valid(mixture)
        check_valid(mixture.demos)


@pytest.mark.parametrize("own", [True, False])
def test_the_other_store_does_not_change(own: bool) -> None:
    mixture = make_mixture(0.5)
    sample = drawn(mixture, 60)
    keys = sample.keys[(sample.keys >= 0) == own]
    before = {True: mixture.selector.save(), False: mixture.demos.selector.save()}
    mixture.update(keys, np.full(len(keys), 9.0))
    after = {True: mixture.selector.save(), False: mixture.demos.selector.save()}
    assert (before[not own] == after[not own]).all() and (before[own] != after[own]).any()


def test_priorities_of_blocks_that_are_gone_are_counted_and_demonstrations_never_go() -> None:
    mixture = make_mixture(0.5)
    sample = drawn(mixture, 60)
    fill(mixture, OWN, 12, first=OWN_BLOCKS)  # all earlier blocks are gone
    demos = everything(mixture.demos)[0][:-1]
    mixture.update(sample.keys, np.ones(60))
    assert mixture.stale == (sample.keys >= 0).sum() > 0 and mixture.demos.stale == 0
    assert mixture.demos.size == THEIR_BLOCKS * (S - 1) and everything(mixture.demos)[0][:-1] == demos
    assert (mixture.demos.selector.save()[[-1 - key for key in sample.keys.tolist() if key < 0]] == 1).all()
    mixture.trim()
    assert mixture.demos.size == THEIR_BLOCKS * (S - 1)


# The limiter.


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_the_limiter_counts_all_that_is_drawn(ratio: float) -> None:
    """Actors and learner in turn, as fast as they may: neither waits for ever, and an item is drawn 4 times on average."""
    limiter = SamplesPerInsert.for_run(4.0, 12, burst=S, batch=16)
    mixture = make_mixture(ratio, limiter=limiter, blocks=0)
    sequence = waited = drawn_items = 0
    for _ in range(2_000):
        if mixture.insert(make_block(SCHEMA, Source(OWN, sequence), [True] * S), None):
            sequence, waited = sequence + 1, 0
        waited += 1
        assert waited < 20, "an actor is blocked for ever"
        if mixture.sample(16) is not None:
            drawn_items += 16
    assert mixture.sampled == drawn_items
    assert abs(drawn_items - 4.0 * (mixture.inserted - 12)) <= limiter.tolerance and mixture.inserted > 4_000


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_an_actor_that_is_too_fast_waits_for_the_learner(ratio: float) -> None:
    limiter = SamplesPerInsert.for_run(1.0, 4, burst=S, batch=8)
    mixture = make_mixture(ratio, limiter=limiter, blocks=0)
    sequence = 0
    while mixture.insert(make_block(SCHEMA, Source(OWN, sequence), [True] * S), None):
        sequence += 1
        assert sequence < 50
    batches = 0
    while mixture.sample(8) is not None:
        batches += 1
        assert batches < 25, "the learner never waits"
    assert mixture.insert(make_block(SCHEMA, Source(OWN, sequence), [True] * S), None)


@pytest.mark.parametrize("ratio", [0.25, 1.0])
@pytest.mark.parametrize("limiter", [MinSize(10), SamplesPerInsert.for_run(8.0, 10, S, 16)], ids=["min size", "rate"])
def test_nothing_is_drawn_before_the_run_has_enough_of_its_own(ratio: float, limiter: Limiter) -> None:
    mixture = make_mixture(ratio, limiter=limiter, blocks=3)
    assert mixture.size == 9 and mixture.demos.size > 10
    before = everything(mixture), everything(mixture.demos)
    assert mixture.sample(16) is None
    assert (everything(mixture), everything(mixture.demos)) == before, "a refusal changes nothing"
    fill(mixture, OWN, 1, first=3)
    check_origin(mixture, drawn(mixture, 16))


def test_what_is_told() -> None:
    mixture = make_mixture(0.25)
    assert "demo_part" not in mixture.metrics() and mixture.metrics()["demo_items"] == mixture.demos.size
    theirs = sum(int((drawn(mixture, 32).keys < 0).sum()) for _ in range(50))
    told = mixture.metrics()
    assert told["demo_part"] == theirs / 1_600 and told["store_sampled"] == 1_600
    assert told["store_items"] == OWN_BLOCKS * (S - 1)
    assert told["store_bytes"] == (OWN_BLOCKS + THEIR_BLOCKS) * SCHEMA.nbytes


def test_a_store_that_goes_on_in_the_memory_of_a_killed_one_keeps_its_counts() -> None:
    """Its counts may lack the one sample in which it was killed, but not those before it."""
    for ratio in (0.0, 0.5):
        mixture = make_mixture(ratio, memory=PrivateMemory())
        for _ in range(5):
            drawn(mixture, 8)
        assert dict(zip(COUNTS, mixture._kept.tolist(), strict=True))["sampled"] == mixture.sampled == 40


def test_a_batch_of_demonstrations_alone_is_kept_in_the_counts_too() -> None:
    mixture = make_mixture(1.0, memory=PrivateMemory())
    for _ in range(5):
        drawn(mixture, 8)
    assert dict(zip(COUNTS, mixture._kept.tolist(), strict=True))["sampled"] == mixture.sampled == 40


# Checkpoints.


def learn(mixture: Mixture, batches: int) -> list[Any]:
    """What a learner sees, and gives back."""
    seen: list[Any] = []
    for _ in range(batches):
        sample = drawn(mixture, 16)
        mixture.update(sample.keys, 0.1 + np.arange(16.0) % 5)
        arrays = (*sample[:1], *sample.rows.values(), *sample.starts.values(), sample.weights, sample.probability)
        seen.append([x.tobytes() for x in arrays])
    return seen


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_a_loaded_mixture_goes_on_with_the_same_samples(ratio: float) -> None:
    mixture = make_mixture(ratio)
    learn(mixture, 20)
    state = mixture.state()
    first, _, blocks = mixture.blocks(0)
    expected = learn(mixture, 20)
    assert len({str(batch) for batch in expected}) == 20
    again = make_mixture(ratio, seed=77)
    again.load_state(state)
    again.load_blocks(first, blocks)
    assert learn(again, 20) == expected
    check_valid(again)
    check_valid(again.demos)
    assert (again.demos.selector.save() == mixture.demos.selector.save()).all()


def test_demonstrations_of_another_size_are_refused() -> None:
    state = make_mixture(0.25).state()
    for slots, count in ((9, 9), (THEIR_BLOCKS, THEIR_BLOCKS - 1)):
        demos = Replay(SCHEMA, Prioritized(slots * S), MinSize(), slots * S, slots)
        fill(demos, THEIRS, count)
        other = Mixture(demos, 0.25, SCHEMA, Prioritized(12 * S), MinSize(1), 12 * S, 12)
        with pytest.raises(UserError, match="The demonstrations differ from those of the checkpoint"):
            other.load_state(state)


# Whole runs.

WINDOWS = {"algorithm.lstm": 8, "algorithm.head": 8, "algorithm.burn_in": 4, "algorithm.length": 8, "algorithm.stride": 4}
SEQUENCES: dict[str, Any] = WINDOWS | {"actor.block": 16, "store.capacity": "1_000", "store.min_size": 30}
LEARNERS: dict[str, dict[str, Any]] = {
    "r2d3": SEQUENCES,
    "r2d2": SEQUENCES,
    "dqn": {},
    "apex-dqn": {"actor.block": 16},
}
SOON: dict[str, Any] = {"runtime": "inline", "steps": 800, "eval.every": 0, "checkpoint.every": 400, "log.every": 0.01}


@pytest.fixture(scope="module")
def carts(tmp_path_factory: pytest.TempPathFactory) -> Demos:
    return recorded(tmp_path_factory.mktemp("mixture") / "carts", balance, "CartPole-v1", 3, max_length=90)


@pytest.mark.parametrize("recipe", LEARNERS)
def test_a_run_learns_from_demonstrations_beside_its_own_steps(recipe: str, carts: Demos, tmp_path: Path) -> None:
    changes = LEARNERS[recipe] | SOON | {"demos": str(carts.path), "demo_ratio": 0.5}
    run = tiny(tmp_path / "r", recipe=recipe, **changes)
    told: dict[str, Any] = {}
    for line in run.metrics:
        told |= line
    stride = LEARNERS[recipe].get("algorithm.stride", 1)
    assert told["demo_items"] == sum(-(-int(length) // stride) for length in carts.lengths), "every step is learned"
    assert told["learner_steps"] > 10 and told["env_steps"] >= 800
    n = told["store_sampled"]
    assert n >= told["learner_steps"] * 16 and told["demo_part"] == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(n))
    assert load_config(run.path / "config.yaml").demos == str(carts.path)
    without = "r2d2" if recipe == "r2d3" else recipe
    alone = tiny(tmp_path / "alone", recipe=without, **LEARNERS[recipe] | SOON)
    assert alone.weights_hash() != run.weights_hash(), "demonstrations are learned from"
    assert alone.metrics[-1]["learner_steps"] == pytest.approx(told["learner_steps"], abs=2), "and no less often"
    assert not any("demo_items" in line for line in alone.metrics)


def test_the_command_takes_demonstrations(capsys: Captured, carts: Demos, tmp_path: Path) -> None:
    words = flags(**SEQUENCES | SOON | {"steps": 500})
    train = ["train", "r2d3", "--env", "CartPole-v1", "--quiet", "--run", str(tmp_path / "r"), *words]
    assert main([*train, "--demos", str(carts.path), "--demo-ratio", "0.125"]) == 0
    config = load_config(tmp_path / "r" / "config.yaml")
    assert (config.demos, config.demo_ratio) == (str(carts.path), 0.125)


def test_demonstrations_that_cannot_be_learned_from_are_refused_before_anything_is_made(
    capsys: Captured, carts: Demos, tmp_path: Path
) -> None:
    counter, out = recorded(tmp_path / "counter", at_random, episodes=3), tmp_path / "r"
    nowhere = str(tmp_path / "nowhere")
    for recipe, changes, says in (
        ("r2d3", {}, "r2d3 needs demonstrations: give their directory with --demos"),
        ("r2d3", {"demos": nowhere}, "there is no such directory"),
        ("r2d3", {"demos": str(tmp_path)}, "not a readable demonstration set"),
        ("dqn", {"demos": str(counter.path)}, "do not fit CartPole-v1"),
        ("r2d3", {"demos": str(carts.path), "demo_ratio": 1.5}, "demo_ratio must be from 0 to 1, not 1.5"),
        ("impala", {"demos": str(carts.path)}, "impala uses each step once, from a queue"),
        ("seed-vtrace", {"demos": str(carts.path)}, "seed-vtrace uses each step once, from a queue"),
    ):
        with pytest.raises(UserError, match=says):
            veldt.train(recipe, env="CartPole-v1", run=out, quiet=True, steps=200, **changes)
        assert not out.exists(), "no run directory is made"
    argv = ("train", "r2d3", "--env", "CartPole-v1", "--quiet", "--run", out)
    assert "there is no such directory" in refused(capsys, *argv, "--demos", nowhere)
    assert "cannot learn from demonstrations" in refused(
        capsys, "train", "impala", "--env", "CartPole-v1", "--quiet", "--run", out, "--demos", carts.path
    )
    assert not out.exists()


@pytest.mark.parametrize("history", [1, 3])
def test_a_demonstration_begins_with_a_state_of_zero_and_the_action_that_led_there(history: int, tmp_path: Path) -> None:
    """A Counter's observation names that action."""
    demos = recorded(tmp_path / "d", at_random, episodes=40)
    changes = SEQUENCES | {"demos": str(demos.path), "demo_ratio": 1.0, "algorithm.history": history}
    config: Config = recipes.make("r2d3", "veldt/Counter-v0", **changes)
    env = make_env("veldt/Counter-v0").spec
    store = store_builder(config)(config, config.schema(env))
    assert isinstance(store, Mixture) and store.ratio == 1.0
    sample = store.demos.draw(2_000)
    at = history - 1  # the state is that before the first row after the history
    valid, first = (sample.rows[name][:, at] for name in ("valid", "first"))
    came_by = sample.rows["obs"][:, at, 3]
    known = valid & ~first
    assert (sample.starts[TAKEN] == np.where(known[:, None], came_by[:, None] == np.arange(3), 0)).all()
    assert set(came_by[known].tolist()) == {0, 1, 2} and (~valid).any(), "windows begin within episodes and before them"
    for name in ("state/h", "state/c"):
        assert sample.starts[name].shape == (2_000, 8) and not sample.starts[name].any()
    if "q" in sample.rows:
        assert not sample.rows["q"].any()


def test_a_run_goes_on_with_no_other_demonstrations(tmp_path: Path) -> None:
    """The directory is the same, what is in it is not."""
    changes = SOON | {"demos": str(tmp_path / "d"), "steps": 500}
    recorded(tmp_path / "d", catch, "veldt/Catch-v0", 4)
    tiny(tmp_path / "r", "veldt/Catch-v0", **changes)
    shutil.rmtree(tmp_path / "d")
    recorded(tmp_path / "d", catch, "veldt/Catch-v0", 5)
    with pytest.raises(UserError, match="The demonstrations differ from those of the checkpoint"):
        tiny(tmp_path / "r", "veldt/Catch-v0", **changes | {"steps": 700})


def test_other_demonstrations_of_the_same_lengths_are_refused(tmp_path: Path) -> None:
    changes = SOON | {"demos": str(tmp_path / "d"), "steps": 500}
    recorded(tmp_path / "d", catch, "veldt/Catch-v0", 4)
    tiny(tmp_path / "r", "veldt/Catch-v0", **changes)
    shutil.rmtree(tmp_path / "d")
    recorded(tmp_path / "d", at_random, "veldt/Catch-v0", 4, seed=9)
    with pytest.raises(UserError, match="The demonstrations differ from those of the checkpoint"):
        tiny(tmp_path / "r", "veldt/Catch-v0", **changes | {"steps": 700})
