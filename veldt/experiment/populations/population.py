"""The state of a population, and what a member does when it is ready. No processes and no files: `scheduler` has those.

The state follows from the lines of the lineage alone, and a decision from the state, the seed, the member and its quantum:
a population that was killed goes on as if it had not been.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from veldt.errors import UserError
from veldt.experiment.populations.rules import exploit, explore
from veldt.experiment.populations.spec import Spec
from veldt.seeds import derive
from veldt.watching.lineage import Line

FAILURES = 3  # in a row, after which a member is given up


@dataclass(frozen=True)
class Outcome:
    """What came of a quantum."""

    returns: tuple[float, ...] = ()  # of the weights at its end
    env_steps: int = 0
    learner_steps: int = 0
    checkpoint: int = 0  # number of the last one; 0: there is none
    seconds: float = 0.0
    train_seconds: float = 0.0
    failed: str = ""  # why there are no returns


@dataclass(frozen=True)
class Result:
    """A member as it was when it was ready: what others compare themselves with, and may copy."""

    quantum: int
    checkpoint: int
    returns: tuple[float, ...]  # empty: it failed
    tuned: dict[str, Any]


@dataclass
class Member:
    index: int
    tuned: dict[str, Any]
    quantum: int = 0  # the last one that it has decided on
    env_steps: int = 0
    result: Result | None = None  # the last one; None: it was not ready yet
    copied: int | None = None  # the member that it copied then
    failures: int = 0  # in a row
    failed: str = ""
    copies: int = 0

    @property
    def out(self) -> bool:
        return self.failures >= FAILURES

    @property
    def returns(self) -> tuple[float, ...]:
        """Since it last copied; empty: unknown."""
        return () if self.result is None or self.copied is not None else self.result.returns

    @property
    def fitness(self) -> float | None:
        return statistics.fmean(self.returns) if self.returns else None


Outcomes = Mapping[int, Outcome]  # of members that are about to decide


@dataclass
class Population:
    spec: Spec
    members: list[Member] = field(default_factory=list)

    def birth(self) -> Line:
        """Of the next member."""
        index = len(self.members)
        return {"event": "born", "member": index, "tuned": self.spec.born(index)}

    def apply(self, line: Line) -> None:
        """Raises a UserError for a line that cannot follow on those before."""
        if line["event"] == "born":
            if line["member"] != len(self.members) or line["tuned"].keys() != self.spec.ranges.keys():
                raise UserError(f"lineage.jsonl is not of this population: member {line['member']} was born in it.")
            self.members.append(Member(line["member"], line["tuned"]))
            return
        if line["member"] >= len(self.members) or line["quantum"] != self.members[line["member"]].quantum + 1:
            raise UserError(f"lineage.jsonl has lost a line before member {line['member']}, quantum {line['quantum']}.")
        member, copied = self.members[line["member"]], line.get("copied")
        member.result = Result(line["quantum"], line["checkpoint"], tuple(line["returns"]), line["tuned"])
        member.quantum, member.env_steps = line["quantum"], line["env_steps"]
        member.failed, member.tuned = line.get("failed", ""), line["next"]
        member.failures = member.failures + 1 if member.failed else 0
        member.copied = copied["member"] if copied else None
        member.copies += bool(copied)

    def finished(self, member: Member) -> bool:
        return member.out or member.quantum >= self.spec.quanta

    @property
    def done(self) -> bool:
        return len(self.members) == self.spec.size and all(map(self.finished, self.members))

    def to_train(self, busy: Sequence[int]) -> Member | None:
        """The member that has trained least, without those that are `busy`: in training, or about to decide. In rounds,
        none begins a quantum before all have decided on the one before."""
        going = [m for m in self.members if not self.finished(m)]
        round_ = min((m.quantum for m in going), default=0)
        free = [m for m in going if m.index not in busy and (m.quantum == round_ or self.spec.order == "arrival")]
        return min(free, key=lambda m: (m.quantum, m.index), default=None)

    def may_decide(self, index: int, outcomes: Outcomes) -> bool:
        """In rounds: once all have trained as far as this member."""
        quantum = self.members[index].quantum
        going = [m for m in self.members if not self.finished(m)]
        return self.spec.order == "arrival" or all(m.quantum > quantum or m.index in outcomes for m in going)

    def decide(self, index: int, outcomes: Outcomes) -> Line:
        """The line of a member that is ready: whom it copies, and the values that it goes on with."""
        member, spec, outcome = self.members[index], self.spec, outcomes[index]
        line: Line = {
            "event": "ready",
            "member": index,
            "quantum": member.quantum + 1,
            "env_steps": outcome.env_steps,
            "learner_steps": outcome.learner_steps,
            "checkpoint": outcome.checkpoint,
            "returns": list(outcome.returns),
            "fitness": statistics.fmean(outcome.returns) if outcome.returns else None,
            "tuned": member.tuned,
            "next": member.tuned,
            "seconds": round(outcome.seconds, 3),
            "train_seconds": round(outcome.train_seconds, 3),
        }
        line |= {"failed": outcome.failed} if outcome.failed else {}
        rng = np.random.default_rng(derive(spec.seed, "ready", member.quantum + 1, index))
        found = self._donor(member, outcomes, rng)
        if found is not None:
            donor, there = found
            copied = {"member": donor, "quantum": there.quantum, "checkpoint": there.checkpoint}
            line["copied"] = copied | {"fitness": statistics.fmean(there.returns)}
            line["next"] = explore(spec.explore, there.tuned, spec.ranges, rng)
        return line

    def _donor(self, member: Member, outcomes: Outcomes, rng: np.random.Generator) -> tuple[int, Result] | None:
        outcome, quantum = outcomes[member.index], member.quantum + 1
        # After its last quantum nothing would be trained with what it copies.
        if quantum >= self.spec.quanta or outcome.env_steps < self.spec.warm_up or not outcome.checkpoint:
            return None
        others = self._of_round(quantum, outcomes) if self.spec.order == "rounds" else self._latest(member)
        if others is None:
            return None
        found = {i: result.returns for i, result in others.items() if result.returns and i != member.index}
        found |= {member.index: outcome.returns} if outcome.returns else {}
        only = {i for i in found if self.spec.order == "rounds" or self.members[i].copied is None}
        chosen = exploit(self.spec.exploit, member.index, found, rng, only)
        return None if chosen is None else (chosen, others[chosen])

    def _of_round(self, quantum: int, outcomes: Outcomes) -> dict[int, Result]:
        """All at the end of the same quantum: as it was before anyone copied."""
        ready = {i: Result(quantum, x.checkpoint, x.returns, self.members[i].tuned) for i, x in outcomes.items()}
        results = {m.index: m.result for m in self.members if m.result is not None and m.result.quantum == quantum}
        return results | ready

    def _latest(self, member: Member) -> dict[int, Result] | None:
        """The last result of each of the others, as in the paper. None: one has none yet; a rank in a part says little."""
        others = {m.index: m.result for m in self.members if m is not member and not m.out}
        results = {i: result for i, result in others.items() if result is not None}
        return results if len(results) == len(others) else None

    @property
    def best(self) -> Member | None:
        """Of those that have a fitness."""
        return max((m for m in self.members if m.returns), key=lambda m: (m.fitness, -m.index), default=None)
