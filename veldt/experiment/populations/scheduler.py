"""The scheduler of a population: trains its members in quanta, a few at a time, and carries out what they decide.

DIR/population.yaml       the file that was run
    lineage.jsonl         what happened, written before it is done
    member-3/             an ordinary run
    member-3.yaml         its settings as they are now
    worker-0.log          what a process that trains has printed
    population.png        the family tree, the settings and the fitness
"""

import logging
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from veldt.errors import UserError
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.directory import read_yaml
from veldt.experiment.populations.crew import Crew, Job
from veldt.experiment.populations.population import Member, Outcome, Population
from veldt.experiment.populations.roster import Roster
from veldt.experiment.populations.spec import Spec
from veldt.experiment.populations.transplant import transplant
from veldt.experiment.settings import as_plain
from veldt.experiment.sweep import check_stores
from veldt.files import replace_text
from veldt.signals import interruptible
from veldt.watching.lineage import Line, Lineage, read_lineage

log = logging.getLogger("veldt")
WAIT_S = 0.25  # for an outcome, before the next look at deadlines and signals
MAY_DIFFER = ("name", "at_once", "timeout_s")  # keys of the file in which a population that goes on may have changed
FILE = "population.yaml"


def check_same(plain: dict[str, Any], file: Path, may_differ: Container[str] = MAY_DIFFER) -> None:
    """Raises a UserError if the directory's file asks for something else."""
    if not file.exists():
        return
    theirs = read_yaml(file)
    theirs = theirs if isinstance(theirs, dict) else {}
    for key in sorted(theirs.keys() | plain.keys()):
        if key not in may_differ and theirs.get(key) != plain.get(key):
            there = f"{key} is {theirs.get(key)!r} there and {plain.get(key)!r} here"
            raise UserError(f"{file} was started with another file: {there}; choose another --dir.")


class Scheduler:
    """Goes on where the directory's lineage ends."""

    def __init__(self, spec: Spec, directory: Path, crew: Crew, quiet: bool = False) -> None:
        self.spec, self.directory, self.crew, self.quiet = spec, directory, crew, quiet
        self.population = Population(spec)
        self.interrupted = 0  # signal number
        self._training: set[int] = set()
        self._outcomes: dict[int, Outcome] = {}  # of members that are about to decide
        lines = read_lineage(directory)
        for line in lines:
            self.population.apply(line)
        self._resumed_with = lines[-1] if lines else None
        self.roster = Roster(self.population, quiet)

    def check_memory(self) -> None:
        check_stores(self.spec.at_once * self.spec.base.nbytes, self.spec.at_once, "members")

    def run(self) -> None:
        """Until all members have taken their steps, or a signal came and those in training are ready."""
        replace_text(self.directory / FILE, yaml.safe_dump(self.spec.plain, sort_keys=False))
        self.lineage = Lineage(self.directory)
        message = "" if self.quiet else "Stopping when the members in training are ready"
        try:
            if self._resumed_with is not None:
                self._copy_if_missing(self._resumed_with)
            while len(self.population.members) < self.spec.size:
                self._add(self.population.birth())
            with self.roster, interruptible(self._stop, message):
                while not self.population.done and (self._training or not self.interrupted):
                    self._start()
                    ended = self.crew.wait(WAIT_S)
                    if ended is not None:
                        self._collect(*ended)
                    self.roster.show(self._training)
        finally:
            self.crew.close()
            self.lineage.close()

    def _start(self) -> None:
        while not self.interrupted and len(self._training) < self.spec.at_once:
            member = self.population.to_train([*self._training, *self._outcomes])
            if member is None:
                return
            self._training.add(member.index)
            self.crew.start(self._job(member))

    def _job(self, member: Member) -> Job:
        file = self.directory / f"member-{member.index}.yaml"
        config = self.spec.config(member.index, member.tuned)
        replace_text(file, yaml.safe_dump(as_plain(config), sort_keys=False))
        until = self.spec.until(member.quantum + 1)
        return Job(member.index, file, self.path(member.index), until, self.spec.timeout_s, config.runtime == "local")

    def path(self, index: int) -> Path:
        return self.directory / f"member-{index}"

    def _collect(self, job: Job, outcome: Outcome) -> None:
        self._training.discard(job.member)
        if outcome.failed and not outcome.checkpoint:  # it was killed: what it has is what is there
            outcome = replace(outcome, **self._left_behind(job.member))
        self._outcomes[job.member] = outcome
        self.roster.tell_ready(job.member, outcome, len(self._outcomes))
        while ready := [i for i in sorted(self._outcomes) if self.population.may_decide(i, self._outcomes)]:
            line = self.population.decide(ready[0], self._outcomes)
            del self._outcomes[ready[0]]
            self._add(line)
            self._copy_if_missing(line)
            self.roster.tell_decided(line)

    def _left_behind(self, index: int) -> dict[str, Any]:
        try:
            found = Checkpoints(self.path(index) / "checkpoints").load(blocks=False)
        except UserError:
            found = None
        if found is None:
            return {}
        counts = {name: int(found.manifest[name]) for name in ("env_steps", "learner_steps")}
        return {**counts, "checkpoint": found.number}

    def _add(self, line: Line) -> None:
        self.lineage.add(line)
        self.population.apply(line)

    def _copy_if_missing(self, line: Line) -> None:
        """Carries out a copy that the lineage has, unless it was carried out before a kill."""
        if not (copied := line.get("copied")):
            return
        recipient, own = self.path(line["member"]), line["checkpoint"]
        newest = Checkpoints(recipient / "checkpoints").load(blocks=False)
        if newest is None or newest.number > own:
            return
        note = {"quantum": line["quantum"], "from": copied["member"], "checkpoint": copied["checkpoint"]}
        transplant(recipient, own, self.path(copied["member"]), copied["checkpoint"], note, self.spec.copy_store)

    def _stop(self, number: int) -> None:
        self.interrupted = number
