"""A site: one host's share of a run. Its actors are processes of this host, supervised and restarted here; one more, the
relay, has the only stream to the run, over which blocks, calls and weights of all of them travel.

    actor/3 ─┐ rings                                                    [ veldt train ... --gate.listen ]
    actor/4 ─┼───────> relay ═══ one gRPC stream ═══ gate ── rings ──> store or policy
    actor/5 ─┘ <─ cell: weights

The run sends the same assignments as to single actors (`joined`), one for each seat; they are parsed and checked here, and
what may be imported is restricted in the site's processes too. With central inference none of them loads torch or numba.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from veldt import callables
from veldt.acting.actor import Policy
from veldt.counters import Counters
from veldt.errors import ProcessFailed, UserError
from veldt.experiment.joined import Assignment, add_light_actor, check_weights, explained, match, reached
from veldt.metrics import own_metrics
from veldt.program import CELL, ROWS, Program
from veldt.records.checks import ActionCheck
from veldt.runtime.grpc.connection import LinkLost
from veldt.runtime.grpc.link import Link
from veldt.runtime.grpc.relay import HOLD, ORDERS, QUIT, STOPPING, Carried, LanePlan, Relay, SitePlan
from veldt.runtime.grpc.session import LinkSeat
from veldt.runtime.grpc.wire import parse_formats
from veldt.runtime.local import zygote
from veldt.runtime.local.local import Local, LocalNodes
from veldt.storing.store import Store

METRICS_S = 1.0  # between two reports of metrics to the run
LIVES = 1_000  # of an actor in one session; more than those are not expected

log = logging.getLogger("veldt")


class RemoteStore(Carried, Store):
    """The run's store, for the recorders of a site."""


class RemotePolicy(Carried, Policy):
    """The run's central inference, for the actors of a site."""


def live(link: Link, assignments: list[Assignment], leaving: Callable[[], bool], step_timeout: float) -> None:
    """Acts until the run ends, or `leaving` says so. Takes the link's session over from it."""
    central, seats = assignments[0].config is None, link.session.seats
    if central:
        os.environ["VELDT_LIGHT"] = "1"
    zygote.start_early(light=central)
    try:
        with callables.only(assignments[0].imports):
            with explained():
                program = make_program(link, assignments)
            runtime = Local(None, step_timeout, LIVES * max(seat.incarnation for seat in seats), _queue(seats))
            link.detach()
            with _log_to_screen(), loss_of_the_link(), runtime.start(program) as nodes:
                first, last = (f"actor/{assignment.index}" for assignment in (assignments[0], assignments[-1]))
                where = "central" if central else "local"
                what = f"{len(seats)} actors, {first} ... {last}" if len(seats) > 1 else first
                print(f"acting in {assignments[0].env} as {what}, with {where} inference", flush=True)
                supervise(nodes, [f"actor/{assignment.index}" for assignment in assignments], leaving)
    finally:
        zygote.discard()


@contextmanager
def loss_of_the_link() -> Iterator[None]:
    """That the relay has lost the run is no fault of its process, whose traceback would say nothing more."""
    try:
        yield
    except ProcessFailed as error:
        if (why := str(error).removeprefix(f"relay failed with {LinkLost.__name__}: ")) != str(error):
            raise LinkLost(why) from None
        raise


def supervise(nodes: LocalNodes, actors: list[str], leaving: Callable[[], bool]) -> None:
    supervisor, orders = nodes.supervisor, nodes.supervisor.arrays["orders"]
    plan, reported = supervisor.plan, 0.0
    known = {actor: own_metrics([plan.nodes[name] for name in plan.processes[actor]]).keys() for actor in actors}
    while not leaving() and not orders[QUIT]:
        nodes.holding, supervisor.board.stopping = bool(orders[HOLD]), bool(orders[STOPPING])
        supervisor.watchdog.excuse()  # a run that cannot be reached, or does not learn, is waited for (see `patience`)
        nodes.step()
        supervisor.answers.clear()  # of the relay, which has taken metrics
        if time.monotonic() - reported > METRICS_S:
            reported = time.monotonic()
            for process, metrics in supervisor.reports.take_each().items():
                if process in known:
                    own = {name: x for name, x in metrics.items() if name in known[process]}
                    nodes.give("relay", "report", "relay", (actors.index(process), own))


def make_program(link: Link, assignments: list[Assignment]) -> Program:
    """The actors, and the relay in place of the rest of the run."""
    if len({assignment.config is None for assignment in assignments}) > 1:
        raise UserError("The run asks for central and for local inference at once; is it the run that you meant to join?")
    program = Program()
    counters, orders = program.add("counters", Counters, ROWS), program.array("orders", (len(ORDERS),), np.int64)
    if assignments[0].config is None:
        spec, node, messages = reached(assignments[0])
        match(link, node, messages, ())
        plan = _plan(link, assignments, {f"{node} calls": ActionCheck(spec)})
        relay = program.add("relay", Relay, plan, counters, orders, {}, light=True)
        recorder = program.add(node, RemotePolicy, relay, node, on=relay, light=True)
        for assignment in assignments:
            add_light_actor(program, assignment, recorder, counters)
        return program
    from veldt.learning.params import LatestParams
    from veldt.topologies import add_actor

    spec, node, messages = reached(assignments[0])
    match(link, node, messages, ("cell params",))
    config = assignments[0].config
    size = sum(x.numel() for x in config.algorithm.network(spec).parameters())
    size += sum(x.numel() for x in config.algorithm.network(spec).buffers() if x.is_floating_point())
    params = program.add("params", LatestParams, CELL)
    plan = _plan(link, assignments, {"cell params": partial(check_weights, size)})
    relay = program.add("relay", Relay, plan, counters, orders, {"cell params": params})
    store = program.add(node, RemoteStore, relay, node, on=relay)
    for assignment in assignments:
        add_actor(program, assignment.config, spec, assignment.index, store, params, counters)
    return program


def _plan(link: Link, assignments: list[Assignment], checks: dict[str, Any]) -> SitePlan:
    session, names = link.session, tuple(f"actor/{assignment.index}" for assignment in assignments)
    if len(set(names)) < len(names):
        raise UserError("The run has given two actors of this site the same name; is it the run that you meant to join?")
    lanes = tuple(_lanes(seat) for seat in session.seats)
    settings = (link.address, session.id, *link.credentials, session.compress, link.patience)
    return SitePlan(*settings, names, lanes, checks)


def _lanes(seat: LinkSeat) -> dict[str, LanePlan]:
    found = {}
    for port in seat.ports:
        there, back = ([format_.columns for format_ in parse_formats(port[name] or [])] for name in ("formats", "answers"))
        found[str(port["name"])] = LanePlan(there, back, int(port["written"]), int(port["tail"]))
    return found


def _queue(seats: list[LinkSeat]) -> int:
    """Messages that may wait in a ring: as many as may be on their way, so that what is counted has been sent."""
    return max(2, min(16, *(int(port["window"]) for seat in seats for port in seat.ports)))


@contextmanager
def _log_to_screen() -> Iterator[None]:
    screen = logging.StreamHandler()
    screen.setLevel(logging.WARNING)
    screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    log.addHandler(screen)
    try:
        yield
    finally:
        log.removeHandler(screen)
