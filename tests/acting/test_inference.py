"""BatchedPolicy: many groups in one forward pass are answered as each would be alone; a slow group delays no other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import examples
from running import run_until
from test_services import Sums, client, serve, server, step

from veldt.acting import policy as inference
from veldt.acting.policy import BatchedPolicy, LocalPolicy
from veldt.acting.recorder import Recorder
from veldt.algorithms.dqn import DQN
from veldt.algorithms.r2d2 import R2D2
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.counters import Counters
from veldt.experiment import recipes
from veldt.learning.params import LatestParams, Weights
from veldt.records.step import EnvSpec
from veldt.records.tree import Array, Tree, spec
from veldt.runtime import Inline
from veldt.topologies import make_program

N = 3  # environments of a group
ENV = EnvSpec("test", {"obs": spec((5,), np.float32)}, spec((), np.int64), spaces.Discrete(3))
PIXELS = EnvSpec("test", {"obs": spec((6, 6), np.uint8)}, spec((), np.int64), spaces.Discrete(3))
ALGORITHMS: dict[str, tuple[Any, EnvSpec]] = {
    "dqn": (DQN(hidden=(16,)), ENV),
    "dqn, history 4": (DQN(hidden=(16,), history=4), ENV),
    "dqn, frames": (DQN(hidden=(16,), history=4, convnet="mlp"), PIXELS),
    "r2d2": (R2D2(hidden=(16,), lstm=8, head=0), ENV),
    "vtrace": (VTraceActorCritic(hidden=(16,)), ENV),
    "vtrace, lstm": (VTraceActorCritic(hidden=(16,), lstm=8), ENV),
    "vtrace, lstm, history 3": (VTraceActorCritic(hidden=(16,), lstm=8, history=3), ENV),
}


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(inference, "time", made)
    return made


def batched(kind: str = "dqn", groups: int = 3, explore: Any = None, **more: Any) -> BatchedPolicy:
    algorithm, env = ALGORITHMS[kind]
    how = {"batch": groups * N, "wait": 0.001} | more
    explore = np.zeros(groups * N) if explore is None else explore
    return BatchedPolicy(
        algorithm,
        env,
        more.pop("params", LatestParams()),
        Counters(),
        explore,
        1,
        groups=groups,
        n=N,
        **{name: x for name, x in how.items() if name != "params"},
    )


def random_step(env: EnvSpec, rng: np.random.Generator, first: bool = False) -> Tree:
    obs = env.observation["obs"]
    last = rng.random(N) < 0.2
    return {
        "obs": (255 * rng.random((N, *obs.shape))).astype(obs.dtype),
        "reward": rng.random(N).astype(np.float32),
        "discount": np.where(last, 0, 1).astype(np.float32),
        "first": np.ones(N, np.bool_) if first else rng.random(N) < 0.2,
        "last": last,
        "valid": rng.random(N) < 0.9,
    }


def answers(policy: BatchedPolicy, groups: list[int]) -> dict[int, Tree]:
    """Whoever asked is answered at the second try."""
    out: dict[int, Tree] = {}
    for _ in range(2):
        for group in groups:
            if group not in out and (found := policy.recv(group)) is not None:
                out[group] = found
    assert sorted(out) == sorted(groups)
    return out


@pytest.mark.parametrize("kind", ALGORITHMS)
@settings(max_examples=examples(15), deadline=None)
@given(batches=st.lists(st.permutations(range(3)).flatmap(lambda p: st.integers(1, 3).map(lambda k: p[:k])), max_size=12))
def test_groups_together_are_answered_as_each_alone(kind: str, batches: list[list[int]]) -> None:
    """Greedy, so that no random number matters; in any order and any company."""
    algorithm, env = ALGORITHMS[kind]
    together = batched(kind, wait=0.0)
    alone = [LocalPolicy(algorithm, env, LatestParams(), Counters(), np.zeros(N), seed=1) for _ in range(3)]
    for one in alone:
        one.vector.copy_(together.vector)
    rng, begun = np.random.default_rng(0), set()
    for groups in batches:
        steps = {group: random_step(env, rng, group not in begun) for group in groups}
        begun |= set(groups)
        for group in groups:
            assert together.send(group, steps[group])
        for group, out in answers(together, groups).items():
            assert alone[group].send(group, steps[group])
            want = alone[group].recv(group)
            assert want is not None and want.keys() == out.keys()
            for name in want:
                np.testing.assert_allclose(out[name], want[name], rtol=1e-4, atol=1e-5, err_msg=f"{name} of {group}")


@pytest.mark.parametrize("kind", ALGORITHMS)
@settings(max_examples=examples(15), deadline=None)
@given(
    batches=st.lists(st.permutations(range(5)).flatmap(lambda p: st.integers(1, 5).map(lambda k: p[:k])), max_size=12),
    begins=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 4))),
)
def test_passes_of_a_few_sizes_answer_as_those_of_any_size(
    kind: str, batches: list[list[int]], begins: set[tuple[int, int]]
) -> None:
    """What a GPU captures: batches are filled up with environments that do not exist, and the same numbers decide."""
    explore = np.linspace(0, 1, 5 * N)
    plain, padded = (batched(kind, 5, explore, wait=0.0) for _ in range(2))
    padded.vector.copy_(plain.vector)
    padded.use_graphs()
    assert padded.graphs is not None
    rng = np.random.default_rng(0)
    for number, groups in enumerate(batches):
        for group in range(5):
            if (number, group) in begins:
                plain.reset(group), padded.reset(group)
        for group in groups:
            step = random_step(ALGORITHMS[kind][1], rng)
            assert plain.send(group, step) and padded.send(group, step)
        want, found = answers(plain, groups), answers(padded, groups)
        for group in groups:
            assert want[group].keys() == found[group].keys()
            for name, x in want[group].items():
                assert found[group][name].dtype == x.dtype
                np.testing.assert_allclose(found[group][name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    assert set(padded.graphs._passes) <= {8, 15, 16}


def test_an_algorithm_that_acts_in_one_piece_has_no_graphs() -> None:
    class Whole(DQN):
        def act(self, *args: Any) -> Any:
            return super().act(*args)

    policy = batched()
    policy.algorithm = Whole(hidden=(16,))
    policy.use_graphs()
    assert policy.graphs is None


def test_a_forward_pass_that_fails_as_a_graph_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    policy, plain = batched("vtrace, lstm, history 3", wait=0.0), batched("vtrace, lstm, history 3", wait=0.0)
    plain.vector.copy_(policy.vector)
    policy.use_graphs()
    rng = np.random.default_rng(0)
    for number in range(4):
        step = random_step(ENV, rng)
        policy.send(1, step), plain.send(1, step)
        if number == 2:
            assert policy.graphs is not None
            policy.graphs.algorithm = None  # type: ignore[assignment]
        one, other = answers(policy, [1])[1], answers(plain, [1])[1]
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5)
    assert policy.graphs is None and caplog.text.count("no CUDA graph") == 1


def test_a_group_that_begins_anew_has_no_past() -> None:
    rng = np.random.default_rng(0)
    for kind in ("dqn, history 4", "vtrace, lstm, history 3"):
        used, fresh = batched(kind, wait=0.0), batched(kind, wait=0.0)
        fresh.vector.copy_(used.vector)
        for _ in range(5):
            for group in range(3):
                used.send(group, random_step(ENV, rng))
            answers(used, [0, 1, 2])
        used.reset(1)
        goes_on = random_step(ENV, rng) | {"first": np.zeros(N, np.bool_)}
        for policy in (used, fresh):
            policy.send(1, goes_on)
        one, other = answers(used, [1])[1], answers(fresh, [1])[1]
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-5)
        used.send(0, goes_on), fresh.send(0, goes_on)
        name = "q" if "q" in one else "logits"
        assert not np.allclose(answers(used, [0])[0][name], answers(fresh, [0])[0][name]), "the others have theirs"


def test_a_question_is_withdrawn_by_a_reset_and_the_others_are_answered_right() -> None:
    rng, policy, check = np.random.default_rng(0), batched(wait=0.0), batched(wait=0.0)
    check.vector.copy_(policy.vector)
    steps = [random_step(ENV, rng) for _ in range(3)]
    for group in (2, 0, 1):
        policy.send(group, steps[group])
    policy.reset(2)
    assert policy.asked == [0, 1] and policy.recv(2) is None
    out = answers(policy, [0, 1])
    for group in (0, 1):
        check.send(group, steps[group])
    want = answers(check, [0, 1])
    for group in (0, 1):
        np.testing.assert_array_equal(out[group]["q"], want[group]["q"])
    policy.send(0, steps[0])
    policy.reset(0)
    assert policy.asked == [] and policy.due == math.inf


def test_every_environment_explores_as_much_as_it_is_told() -> None:
    policy = batched(groups=2, explore=np.array([0.0, 1.0, 0.0, 1.0, 0.0, 1.0]), wait=0.0)
    rng = np.random.default_rng(0)
    one = random_step(ENV, rng)
    actions = []
    for _ in range(60):
        for group in (1, 0):
            policy.send(group, one)
        out = answers(policy, [0, 1])
        actions.append(np.concatenate([out[group]["action"] for group in (0, 1)]))
    varied = [len(set(column)) > 1 for column in np.array(actions).T]
    assert varied == [False, True, False, True, False, True]


def test_weights_are_looked_for_with_every_batch_and_their_version_is_recorded() -> None:
    params = LatestParams()
    policy = batched("vtrace", groups=1, params=params)
    for version in (3, 7):
        params.publish(Weights(version, policy.vector.numpy() + 1))
        policy.send(0, random_step(ENV, np.random.default_rng(0)))
        assert (answers(policy, [0])[0]["version"] == version).all() and policy.version == version


# When a batch is run.


def ask(policy: BatchedPolicy, *groups: int) -> None:
    for group in groups:
        assert policy.send(group, random_step(ENV, np.random.default_rng(0), True))


def test_a_batch_is_run_once_all_have_asked(clock: Clock) -> None:
    policy = batched(wait=10.0, together=2)
    ask(policy, 0, 2)
    assert [policy.recv(0), policy.recv(2), policy.recv(0)] == [None] * 3
    ask(policy, 1)
    assert policy.recv(0) is not None and policy.recv(1) is not None and policy.recv(2) is not None
    assert policy.recv(0) is None, "an answer comes once"
    assert policy.metrics()["inference_batch"] == 3 * N


def test_a_batch_is_run_once_it_is_as_large_as_it_may_be(clock: Clock) -> None:
    policy = batched(groups=4, wait=10.0, batch=2 * N, together=2)
    ask(policy, 3)
    assert policy.recv(3) is None and policy.recv(3) is None
    ask(policy, 1)
    assert policy.recv(3) is not None and policy.recv(1) is not None


def test_nobody_waits_longer_than_that(clock: Clock) -> None:
    policy = batched(groups=4, wait=0.5, together=2)
    ask(policy, 1)
    assert policy.due == clock.now + 0.5
    assert policy.recv(1) is None and policy.recv(1) is None
    clock.now += 0.3
    ask(policy, 2)
    assert policy.due == clock.now + 0.2, "the first counts"
    assert policy.recv(1) is None
    clock.now += 0.21
    assert policy.recv(1) is not None and policy.recv(2) is not None and policy.due == math.inf


def test_an_actor_that_has_nothing_left_to_do_is_not_kept_waiting(clock: Clock) -> None:
    """It is told "not yet" once, so that the others can ask; their groups go with its own."""
    policy = batched(groups=6, wait=10.0, together=2)
    ask(policy, 4, 1)
    assert policy.recv(4) is None and policy.recv(4) is None
    ask(policy, 5)
    assert policy.recv(4) is not None and policy.recv(5) is not None and policy.recv(1) is not None
    ask(policy, 0)
    assert policy.recv(0) is None and policy.recv(0) is None, "what was answered does not count"
    ask(policy, 1)
    policy.reset(1)
    assert policy.recv(0) is None, "nor what was withdrawn"
    ask(policy, 1)
    assert policy.recv(0) is not None


# Behind rings: the host of a policy that answers many at once.


class Patient(Sums):
    """Answers when all have asked, and logs calls of `record`."""

    def __init__(self, groups: int, life: int = 0) -> None:
        super().__init__(life)
        self.groups, self.held = groups, dict[int, Tree]()
        self.seen: list[Array] = []

    def send(self, group: int, step: Tree) -> bool:
        self.held[group] = step
        if len(self.held) == self.groups:
            for held, one in self.held.items():
                super().send(held, one)
            self.seen = [one["obs"] for one in self.held.values()]
            self.held = {}
        return True

    def record(self) -> None:
        """What was asked can be read until it is recorded."""
        for obs in self.seen:
            self.log.append(("record", *obs.tolist()))
        self.seen = []


def test_all_groups_of_a_process_are_taken_before_any_is_answered(fds: list[int]) -> None:
    policy = Patient(4, life=10)
    clients, host = [client(fds, at) for at in (0, 2)], server(policy, fds, 0, 2)
    for turn in range(20):
        for group in (3, 0, 2, 1):
            assert clients[group // 2].send(group, step(100 * group + turn))
        serve(host, 3)
        for group in range(4):
            out = clients[group // 2].recv(group)
            assert out is not None and out["action"].tolist() == [100 * group + turn + 10]
        assert sorted(entry[1] for entry in policy.log[-4:]) == [turn, 100 + turn, 200 + turn, 300 + turn]
        assert {entry[0] for entry in policy.log[-4:]} == {"record"}


def test_answers_go_out_before_they_are_recorded(fds: list[int]) -> None:
    policy = Patient(2)
    one = client(fds)
    found: list[Any] = []
    record = policy.record

    def look() -> None:
        found.append([one.recv(group) for group in (0, 1)])
        record()

    policy.record = look  # type: ignore[method-assign]
    host = server(policy, fds)
    assert one.send(0, step(5)) and one.send(1, step(6))
    host.step()
    assert [x["action"].tolist() for x in found[0]] == [[5], [6]]


@pytest.mark.parametrize("popped", [0, 1, 2])
def test_a_new_life_answers_none_of_many_twice(popped: int, fds: list[int]) -> None:
    """The server dies after it answered three groups of one process, and took none, one or two from the stream."""
    one, first = client(fds), server(Patient(3, life=10), fds)
    assert one.send(0, step(1)) and one.send(1, step(2)) and one.send(2, step(3))
    pop, left = first._callers[0].calls.pop, [popped]

    def dying() -> None:
        if left[0] == 0:
            raise ZeroDivisionError
        left[0] -= 1
        pop()

    first._callers[0].calls.pop = dying  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        first.step()
    second = Patient(1, life=20)
    serve(server(second, fds))
    assert second.log == []
    assert [one.recv(group)["action"].tolist() for group in range(3)] == [[11], [12], [13]]  # type: ignore[index]
    assert one.send(1, step(4))
    serve(server(second, fds))
    assert one.recv(1)["action"].tolist() == [24]  # type: ignore[index]


def test_what_a_dead_client_asked_does_not_hold_up_its_successor(fds: list[int]) -> None:
    """The batch is never complete, so the old question is never answered; the new life asks about the same group."""
    policy = Patient(2)
    old, host = client(fds), server(policy, fds)
    assert old.send(0, step(1))
    serve(host)
    new = client(fds)
    for group in (0, 1):
        new.reset(group)
    for group in (0, 1):
        if not new.send(group, step(7 + group)):
            serve(host)
            assert new.send(group, step(7 + group))
    serve(host)
    assert [new.recv(group)["action"].tolist() for group in (0, 1)] == [[7], [8]]  # type: ignore[index]
    assert host._callers[0].calls.waiting == 0


# Recording, and whole programs in one thread.


def test_what_is_recorded_later_is_the_same() -> None:
    class Shelf:
        def __init__(self) -> None:
            self.blocks: list[Any] = []

        def insert(self, block: Any, priorities: Any) -> bool:
            self.blocks.append(({name: x.copy() for name, x in block.rows.items()}, priorities))
            return True

    config = recipes.make("apex-dqn", "CartPole-v1")
    found = []
    for later in (False, True):
        shelf, envs = Shelf(), config.envs(4)
        policy: Any = LocalPolicy(config.algorithm, envs.spec, LatestParams(), Counters(), np.zeros(4), seed=0)
        policy.vector.fill_(0.01)
        recorder = Recorder(policy, shelf, config.algorithm, config.schema(envs.spec), later=later)  # type: ignore[arg-type]
        record = envs.reset(0)
        for _ in range(300):
            assert recorder.send(0, record)
            out = recorder.recv(0)
            assert out is not None
            if later:
                recorder.record()
            record = envs.step(out["action"])
        assert recorder.flush(0)
        found.append(shelf.blocks)
    assert len(found[0]) == len(found[1]) > 10
    for (one, p), (other, q) in zip(*found, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])
        assert (p == q).all()


@pytest.mark.parametrize("recipe", ["seed-vtrace", "apex-dqn", "dqn"])
def test_central_inference_in_one_thread_runs_all_groups_in_one_batch(recipe: str) -> None:
    actors = 1 if recipe == "dqn" else 3
    config = recipes.make(recipe, "CartPole-v1", runtime="inline", inference="central", actors=actors, **{"eval.every": 0})
    batches: list[float] = []

    def until(nodes: Any) -> bool:
        told = nodes.metrics()
        batches.extend([told["inference_batch"]] if "inference_batch" in told else [])
        return nodes.count("env_steps") > 2_000

    envs = config.envs()
    run_until(Inline(), make_program(config, envs.spec), until)
    assert set(batches) == {8.0 * actors}
