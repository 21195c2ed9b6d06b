"""A random schedule of faults against a real run that learns CartPole, and the promises that are checked meanwhile.

    python tests/chaos_schedule.py --recipe apex-dqn --minutes 2 --seed 7
    python tests/chaos_schedule.py --recipe seed-vtrace --minutes 20 --seed 1 --score 475 -- --transport grpc

Faults come one after another, sometimes two at once: processes are killed or stopped; the whole run is interrupted, killed
or suspended; environments raise, hang, slow down, leak, return NaN or start processes; the disk is full; the wall clock
jumps; the connection of an actor that joined is cut, swallowed or refused. The seed gives their order, kinds and victims.

After each of them all processes are there again, there are new env steps and new updates, and nothing is left of what died,
within a deadline. Every window that is learned from follows the equations of CartPole. At the end nothing is left behind.
Exits with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from chaos_faults import DEADLINE_S, START_S, Broken, Faults, quietly
from chaos_run import Run

END_S = 5.0  # from a signal to the end
PAUSE_S = 4.0  # between two faults, on average
KINDS = {"kill": 8, "stop": 6, "raise": 2, "hang": 1, "slow": 1, "nan": 2, "leak": 1, "spawn": 2, "disk": 2, "clock": 1}
KINDS |= {"cut": 2, "hole": 1, "refuse": 1, "leave": 1, "end": 2, "suspend": 1}


class Schedule(Faults):
    def play(self, seconds: float, pause: float) -> None:
        self.run.start()
        self._follow([("start", self._started())], START_S)
        while time.monotonic() - self.began < seconds:
            self._follow([("", self.pause(self.random.expovariate(1 / pause)))], 60 * pause)
            kinds = self.random.choices(list(KINDS), list(KINDS.values()), k=2 if self.random.random() < 0.2 else 1)
            if "end" in kinds or "suspend" in kinds:  # of all, and so alone
                kinds = [kind for kind in kinds if kind in ("end", "suspend")][:1]
            faults = {kind: getattr(self, kind)() if hasattr(self, kind) else self.order(kind) for kind in kinds}
            self._follow(list(faults.items()), 4 * DEADLINE_S)
            self._count_descriptors()

    def _started(self) -> Iterator[None]:
        yield from self.wait(lambda: self.run.line.get("learner_steps", 0) > 0, START_S, "the first update")
        yield from self._rejoined()
        self._forgive()
        self.stalls = dict.fromkeys(self.stalls, 0.0)

    def _follow(self, faults: list[tuple[str, Iterator[None]]], seconds: float) -> None:
        """Lets faults happen, and waits until the run is well after them."""
        at, playing = time.monotonic(), dict(faults)
        while playing:
            self.look_unless_ending(playing)
            for name in [name for name, fault in playing.items() if next(fault, "end") == "end"]:
                del playing[name]
            if time.monotonic() - at > seconds + START_S:
                raise Broken(f"{', '.join(playing)}: not over")
        names = "+".join(sorted(name for name, _ in faults))
        if names in ("", "start"):
            return
        over, well = time.monotonic(), self.well()
        while not well():
            self.look()
            if time.monotonic() - over > DEADLINE_S:
                raise Broken(
                    f"no recovery {DEADLINE_S:.0f} s after {names}: {self.run.line} {self.run.table()} {self.run.orphans()}"
                )
        self.took.setdefault(names if len(faults) == 1 else "two at once", []).append(time.monotonic() - over)
        print(
            f"{at - self.began:7.1f} s  {names}: {over - at:.1f} s, well after {time.monotonic() - over:.1f} s", flush=True
        )

    def look_unless_ending(self, playing: dict[str, Any]) -> None:
        time.sleep(0.02) if "end" in playing else self.look()

    def _count_descriptors(self) -> None:
        assert self.run.process is not None
        quietly(lambda: self.descriptors.append(psutil.Process(self.run.process.pid).num_fds()))  # type: ignore[union-attr]

    def reach(self, score: float, seconds: float) -> None:
        """Without faults, until an evaluation has this score."""
        self.evaluations.clear()
        self._follow(
            [("", self.wait(lambda: max(self.evaluations, default=-1.0) >= score, seconds, f"a score of {score}"))], seconds
        )

    def finish(self) -> None:
        """The regular end, and what it leaves behind."""
        run = self.run
        assert run.process is not None
        self._note_deaths()
        run.note_members()
        sent = time.monotonic()
        run.signal(signal.SIGINT)
        code = run.process.wait(60)
        self.ends.append(time.monotonic() - sent)
        run.read()
        if code != 130:
            self.problems.append(f"code {code} after the last SIGINT")
        time.sleep(0.5)
        if left := run.left():
            self.problems.append(f"left behind: {left}")
        if orphans := run.orphans():
            self.problems.append(f"grandchildren left behind: {orphans}")
        if names := [name for name in ("processes.json", ".gate") if (run.path / name).exists()]:
            self.problems.append(f"files left behind: {names}")
        if len(self.descriptors) > 6 and min(self.descriptors[-3:]) > max(self.descriptors[:3]) + 2:
            self.problems.append(f"descriptors of the supervisor: {self.descriptors}")
        if max(self.ends) > END_S:
            self.problems.append(f"an end took {max(self.ends):.1f} s")

    def lost(self) -> tuple[int, int]:
        """Env steps that are in no item of the store, by the last checkpoint, and how many may be: what dead processes had
        not sent, and what is on its way."""
        config, nodes = yaml.safe_load((self.run.path / "config.yaml").read_text()), self.run.manifest()["nodes"]
        algorithm, counts, deaths = config["algorithm"], nodes["counters"]["counts"], self.deaths
        stride = algorithm.get("unroll") or algorithm.get("stride") or 1
        block = max(config["actor"].get("block", 0), stride)
        rows = block + algorithm.get("length", 0) + algorithm.get("n", 1) + 2 * stride  # of one environment, unsent
        actors = config["actors"] + 1
        lives = sum(n for name, n in deaths.items() if name.startswith("actor")) + self.left_actors + actors
        lives += actors * (deaths.get("inference", 0) + deaths.get("gate", 0) + 2 * self.resumes)
        queues = (1 + self.resumes) * actors * (config["queue"] + 2) * rows
        copying = len(self.rolled_back) * 1.5 * self.fastest  # a running run counts on while its state is copied
        may = lives * config["envs_per_actor"] * rows + queues + counts["bad_observations"] * rows + copying
        ended = counts["episodes"] if stride > 1 else 0  # the last row of an episode is in an item too
        return counts["env_steps"] + ended - nodes["store"]["counts"]["inserted"] * stride, int(may)

    def report(self) -> dict[str, Any]:
        lost, may = self.lost() if self.run.saved() else (0, 0)
        if lost > may:
            self.problems.append(f"{lost:,} env steps are lost, and {may:,} may be")
        return {
            "faults": {
                name: [len(x), round(float(np.median(x)), 2), round(max(x), 2)] for name, x in sorted(self.took.items())
            },
            "env_steps": self.run.line["env_steps"],
            "updates": self.run.line["learner_steps"],
            "checked": int(self.checked),
            "corrupt": int(self.corrupt),
            "stall_s": {name: round(x, 2) for name, x in self.stalls.items()},
            "lost": lost,
            "may_be_lost": may,
            "deaths": self.deaths,
            "resumes": self.resumes,
            "rolled_back": self.rolled_back,
            "end_s": round(max(self.ends, default=0.0), 2),
            "evaluation": self.evaluations[-1:],
            "memory_restarts": self.run.line.get("memory_restarts"),
            "descriptors": self.descriptors[:1] + self.descriptors[-1:],
            "disk": "a small one" if self.run.mounted else "errors of one",
            "problems": self.problems,
        }


def chaos(
    recipe: str, minutes: float, seed: int, flags: list[str], score: float = 0.0, pause: float = PAUSE_S
) -> dict[str, Any]:
    """The report. `pause`: seconds between two faults, on average."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="veldt-chaos-", ignore_cleanup_errors=True) as name:
        run = Run(recipe, seed, Path(name) / "chaos", flags)
        schedule = Schedule(run, seed)
        try:
            schedule.play(60 * minutes, pause)
            if score:
                schedule.reach(score, 600.0)
            schedule.finish()
        except Broken as problem:
            schedule.problems.append(str(problem))
            log = run.path / "log.txt"
            print(
                (run.folder / "output.txt").read_text()[-4_000:], log.read_text()[-6_000:] if log.exists() else "", sep="\n"
            )
        finally:
            out = schedule.report() if "env_steps" in run.line else {"problems": schedule.problems}
            run.close()
    if left := {name for name in set(os.listdir("/dev/shm")) - before if "veldt" in name}:
        out["problems"].append(f"left in /dev/shm: {sorted(left)}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="apex-dqn")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--score", type=float, default=0.0, help="evaluation to reach in the end, without faults; 0: none")
    parser.add_argument("--out", type=Path, default=None, help="where to write the report, as JSON")
    parser.add_argument("flags", nargs="*", help="more flags for veldt train, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the run, not without it
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    print(f"seed {seed}: {args.recipe} {' '.join(args.flags)}, {args.minutes:g} minutes", flush=True)
    report = chaos(args.recipe, args.minutes, seed, args.flags, args.score)
    print(f"\n{'fault':14}{'times':>6}{'well after (p50)':>18}{'most':>8}")
    for name, (times, median, most) in report.get("faults", {}).items():
        print(f"{name:14}{times:6}{median:16.2f} s{most:6.2f} s")
    for name, value in report.items():
        if name != "faults":
            print(f"{name}: {value}")
    if args.out is not None:
        args.out.write_text(json.dumps({"recipe": args.recipe, "seed": seed, "minutes": args.minutes} | report, indent=1))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
