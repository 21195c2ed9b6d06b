"""Programs, and the runtime that runs them in one thread."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from running import run_until

from veldt.counters import Counters
from veldt.program import INCARNATION, ArrayRef, Given, Program, Ref
from veldt.runtime import Inline, Nodes, Stuck


class Log(list[str]):
    """What happened. Not a plain list: those are copied when the references in them are resolved."""


class Service:
    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log, self.value = name, log, 0
        log.append(f"build {name}")

    def metrics(self) -> dict[str, float]:
        return {self.name: float(self.value)}

    def state(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

    def close(self) -> None:
        self.log.append(f"close {self.name}")


class Worker(Service):
    def __init__(self, name: str, log: Log, other: Any, counters: Any, works: int = 10**9) -> None:
        super().__init__(name, log)
        self.other, self.counters, self.works = other, counters, works

    def step(self) -> bool:
        if self.works == 0:
            return False
        self.works -= 1
        self.value += 1
        self.other.value += 10
        self.counters.add("env_steps", 1)
        return True


def program(log: Log, **more: Any) -> Program:
    out = Program()
    counters = out.add("counters", Counters)
    service = out.add("service", Service, "service", log)
    out.add("worker", Worker, "worker", log, service, counters=counters, **more)
    return out


def test_nothing_is_built_before_the_runtime_starts_and_all_is_closed_after() -> None:
    log = Log()
    plan = program(log)
    assert log == []
    seen: list[tuple[int, dict[str, float]]] = []

    def until(nodes: Nodes) -> bool:
        seen.append((nodes.count("env_steps"), told(nodes)))
        return nodes.count("env_steps") == 3

    run_until(Inline(), plan, until)
    assert log == ["build service", "build worker", "close service", "close worker"]
    assert [steps for steps, _ in seen] == [0, 1, 2, 3]
    assert seen[-1][1] == {"service": 30.0, "worker": 3.0}


def test_refs_become_the_objects_wherever_they_lie() -> None:
    nodes = {"a": object(), "b": object()}
    value = [Ref("a"), (1, Ref("b")), {"x": [Ref("a")]}, "a"]
    assert Given(nodes).resolve(value) == [nodes["a"], (1, nodes["b"]), {"x": [nodes["a"]]}, "a"]


def test_names_are_checked_when_a_node_is_added() -> None:
    out = Program()
    first = out.add("a", Service, "a", Log())
    assert first == Ref("a")
    with pytest.raises(AssertionError, match="two nodes are named a"):
        out.add("a", Service)
    with pytest.raises(AssertionError, match=r"b: z is not in this program"):
        out.add("b", Service, {"deep": [Ref("z")]})
    with pytest.raises(AssertionError, match="there is no node z to share a process with"):
        out.add("b", Service, on=Ref("z"))
    out.add("b", Service, on=first)
    assert out.nodes["b"].on == "a"


def test_a_scope_puts_its_name_before_those_of_its_nodes() -> None:
    out = Program()
    shared = out.add("shared", Service, "shared", Log())
    member = out.scope("member/1").scope("deep")
    assert member.add("worker", Worker, shared) == Ref("member/1/deep/worker")
    assert set(out.nodes) == {"shared", "member/1/deep/worker"}
    with pytest.raises(AssertionError, match="two nodes are named member/1/deep/worker"):
        out.add("member/1/deep/worker", Service)


def test_a_node_can_be_told_which_life_it_is() -> None:
    given = Given({}, placeholders={"incarnation": 3})
    assert given.resolve([INCARNATION, (INCARNATION, 7)]) == [3, (3, 7)]
    assert given.resolve({"x": INCARNATION}) == {"x": 3}


def test_an_array_is_mapped_by_all_nodes_that_are_given_it_and_saved() -> None:
    class Adder:
        def __init__(self, total: Any, by: int) -> None:
            self.total, self.by = total, by

        def step(self) -> bool:
            self.total[1] += self.by
            return True

    plan = Program()
    total = plan.scope("a").array("total", (2, 3), np.float32)
    assert total == ArrayRef("a/total")
    plan.add("one", Adder, total, 1)
    plan.add("ten", Adder, [total][0], 10)
    with Inline().start(plan) as nodes:
        nodes.step()
        nodes.step()
        state = nodes.state()
    assert state["/arrays"]["a/total"].tolist() == [[0, 0, 0], [22, 22, 22]]
    with Inline().start(plan) as nodes:
        nodes.load_state(state)
        nodes.step()
        assert nodes.state()["/arrays"]["a/total"][1].tolist() == [33, 33, 33]


def test_an_array_may_be_saved_in_parts() -> None:
    """Of one scope apart from those of another, in the shapes that were given, and whole again after loading."""

    class Filler:
        def __init__(self, x: Any) -> None:
            self.x = x

        def step(self) -> bool:
            self.x[:] = np.arange(len(self.x))
            return True

    plan = Program()
    for scope in ("a", "b"):
        part = plan.scope(scope)
        x = part.array("x", (8,), np.float32, {"weights/matrix": (2, 3), "weights/number": (), "rest": (1,)})
        part.add("filler", Filler, x)
    with Inline().start(plan) as nodes:
        nodes.step()
        state = nodes.state()
        nodes.step()
    assert "/arrays" not in state and set(state) == {"/arrays/a/x", "/arrays/b/x"}
    found = state["/arrays/a/x"]
    assert found["weights/matrix"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["weights/number"].shape == () and found["weights/number"] == 6 and found["rest"].tolist() == [7]
    with Inline().start(plan) as nodes:
        nodes.load_state(state)
        assert nodes.objects["b/filler"].x.tolist() == list(range(8))
    with pytest.raises(AssertionError):
        plan.array("y", (9,), np.float32, {"a": (2, 4)})


def test_a_node_around_arrays_alone_is_built_by_every_process_that_needs_it() -> None:
    class Around:
        def __init__(self, x: Any) -> None: ...

    plan = Program()
    around = plan.add("around", Around, plan.array("x", (1,), np.int64))
    worker = plan.add("worker", Worker, around)
    assert plan.nodes["around"].everywhere and not plan.nodes["worker"].everywhere
    plan.add("here", Around, Ref("around"), on=worker)
    plan.add("own", Around, plan.array("y", (1,), np.int64), on=worker)
    assert not plan.nodes["here"].everywhere and not plan.nodes["own"].everywhere


def test_all_are_closed_after_an_error() -> None:
    log = Log()

    def until(nodes: Nodes) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_until(Inline(), program(log), until)
    assert log[-2:] == ["close service", "close worker"]


def test_what_was_built_is_closed_when_the_next_cannot_be_built() -> None:
    log = Log()
    plan = program(log)

    def fails() -> None:
        raise ZeroDivisionError

    plan.add("bad", fails)
    with pytest.raises(ZeroDivisionError):
        run_until(Inline(), plan, lambda nodes: True)
    assert log[-2:] == ["close service", "close worker"]


def test_a_program_that_cannot_go_on_says_so_instead_of_waiting() -> None:
    with pytest.raises(Stuck, match=r"worker .*any work"):
        run_until(Inline(), program(Log(), works=4), lambda nodes: False)


def told(nodes: Nodes) -> dict[str, float]:
    return {name: x for name, x in nodes.metrics().items() if not name.startswith("busy/")}


def test_the_time_of_each_kind_of_worker_is_told_as_a_part_of_all() -> None:
    class Sleeper:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def step(self) -> bool:
            time.sleep(self.seconds)
            return True

    seen: list[dict[str, float]] = []
    plan, rounds = Program(), iter(range(100))
    for name, seconds in (("actor/0", 0.002), ("actor/1", 0.002), ("learner", 0.008)):
        plan.add(name, Sleeper, seconds)

    def until(nodes: Nodes) -> bool:
        number = next(rounds)
        if number in (0, 10):
            seen.append(nodes.metrics())
        return number == 10

    run_until(Inline(), plan, until)
    assert set(seen[1]) == {"busy/actor", "busy/learner"}
    assert 0.9 < sum(seen[1].values()) <= 1.0
    assert 0.55 < seen[1]["busy/learner"] < 0.75 and 0.2 < seen[1]["busy/actor"] < 0.45


def test_state_goes_out_and_in_by_node() -> None:
    states: list[dict[str, Any]] = []

    def save(nodes: Nodes) -> bool:
        states.append(nodes.state())
        return nodes.count("env_steps") == 2

    def load(nodes: Nodes) -> bool:
        nodes.load_state(states[-1])
        assert nodes.count("env_steps") == 2
        assert told(nodes) == {"service": 20.0, "worker": 2.0}
        return True

    run_until(Inline(), program(Log()), save)
    assert set(states[-1]) == {"counters", "service", "worker"}
    run_until(Inline(), program(Log()), load)


class Cutter:
    """Cannot cut before it was asked three times; in the meantime others must work."""

    def __init__(self, log: Log, patience: int = 3) -> None:
        self.log, self.patience = log, patience

    def step(self) -> bool:
        self.log.append("step")
        return True

    def cut(self) -> bool:
        self.log.append("cut")
        self.patience -= 1
        return self.patience <= 0

    def resume(self, number: int) -> None:
        self.log.append(f"resume {number}")


class Follower(Cutter):
    """Has moved since its cut if it stepped after it."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.moved = True

    def step(self) -> bool:
        self.moved = True
        return True

    def cut(self) -> bool:
        self.moved = False
        return True


@pytest.mark.parametrize("order", [("cutter", "follower"), ("follower", "cutter")])
def test_after_a_cut_nobody_has_moved_since(order: tuple[str, str]) -> None:
    log = Log()
    followers: list[Follower] = []

    def follower() -> Follower:
        followers.append(Follower(log))
        return followers[-1]

    plan = Program()
    plan.add("counters", Counters)
    for name in order:
        plan.add(name, *((Cutter, log) if name == "cutter" else (follower,)))

    def until(nodes: Nodes) -> bool:
        nodes.cut()
        assert not followers[0].moved
        nodes.resume(7)
        return True

    run_until(Inline(), plan, until)
    assert log.count("cut") >= 3 and log[-1] == "resume 7"
    assert "step" not in log, "who waits to be cut does not step"


def test_a_cut_that_cannot_end_says_so() -> None:
    plan = Program()
    plan.add("counters", Counters)
    plan.add("cutter", Cutter, Log(), patience=10**9)

    def until(nodes: Nodes) -> bool:
        nodes.cut()
        return True

    with pytest.raises(Stuck, match="cutter cannot"):
        run_until(Inline(), plan, until)
