"""The crew of a population: processes that train quanta, one after the other. Each imports torch once, and dies with us."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from veldt.experiment.populations.population import Outcome
from veldt.foreign import regular
from veldt.runtime.local import zygote

TRIES = 3  # of a quantum whose process dies
CODE = (
    "from veldt.runtime.local.zygote import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "from veldt.experiment.populations.crew import serve; serve()"
)


@dataclass(frozen=True)
class Job:
    member: int
    config_file: Path
    run: Path
    until: int  # env steps
    timeout_s: float
    local: bool = False  # its run has processes of its own


class Crew(Protocol):
    """Who trains."""

    def start(self, job: Job) -> None: ...
    def wait(self, seconds: float) -> tuple[Job, Outcome] | None: ...  # None: no quantum has ended in this time
    def close(self) -> None: ...  # kills what is under way


class Processes:
    """As many processes as members are trained at once."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._idle: list[_Worker] = []
        self._busy: list[_Worker] = []
        self._replies: queue.Queue[tuple[_Worker, str]] = queue.Queue()
        self._started = 0

    def start(self, job: Job) -> None:
        if not self._idle:
            self._idle.append(_Worker(self.logs / f"worker-{self._started}.log", self._replies))
            self._started += 1
        worker = self._idle.pop()
        worker.give(job)
        self._busy.append(worker)

    def wait(self, seconds: float) -> tuple[Job, Outcome] | None:
        for worker in self._busy:
            worker.kill_if_late()
        try:
            worker, text = self._replies.get(timeout=seconds)
        except queue.Empty:
            return None
        if worker not in self._busy:  # one that was idle has died
            self._idle = [other for other in self._idle if other is not worker]
            return None
        self._busy.remove(worker)
        job = worker.job
        assert job is not None
        if text:
            self._idle.append(worker)
            found = json.loads(text)
            return job, Outcome(**{**found, "returns": tuple(found["returns"])})
        return self._died(worker, job)

    def _died(self, worker: "_Worker", job: Job) -> tuple[Job, Outcome] | None:
        """The run is as its last checkpoint has it: what was lost is trained again."""
        worker.close()
        if worker.late:
            return job, Outcome(failed=f"it took longer than {job.timeout_s:g} s (timeout_s)", seconds=job.timeout_s)
        if worker.tries < TRIES:
            again = _Worker(worker.log, self._replies, worker.tries + 1)
            again.give(job)
            self._busy.append(again)
            return None
        return job, Outcome(
            failed=f"its process died {TRIES} times (exit code {worker.process.returncode}; see {worker.log})"
        )

    def close(self) -> None:
        for worker in (*self._idle, *self._busy):
            worker.close()
        self._idle, self._busy = [], []


class _Worker:
    def __init__(self, log: Path, replies: "queue.Queue[tuple[_Worker, str]]", tries: int = 1) -> None:
        self.log, self.tries, self.late = log, tries, False
        self.job: Job | None = None
        self._since = time.monotonic()
        command, environment = zygote.interpreter(CODE, str(os.getpid()))
        with open(log, "ab", opener=regular) as file:
            # In a new session: Ctrl-C in the terminal reaches only the population.
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, args=(replies,), name="replies", daemon=True)
        self._reader.start()

    def _read(self, replies: "queue.Queue[tuple[_Worker, str]]") -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                replies.put((self, line))
        self.process.wait()
        replies.put((self, ""))

    def give(self, job: Job) -> None:
        self.job, self._since = job, time.monotonic()
        values = {"config_file": str(job.config_file), "run": str(job.run), "until": job.until, "local": job.local}
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has died: `_read` reports that
            self.process.stdin.write(json.dumps(values) + "\n")
            self.process.stdin.flush()

    def kill_if_late(self) -> None:
        if self.job is not None and time.monotonic() - self._since > self.job.timeout_s:
            self.late = True
            self.process.kill()

    def close(self) -> None:
        self.process.kill()
        self._reader.join(5.0)  # it waits for the process
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # what it did not read
            self.process.stdin.close()


def serve() -> None:
    """A worker: reads jobs from stdin, one a line, and writes outcomes to stdout. What else is printed goes to the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job: dict[str, Any] = json.loads(line)
        if job["local"]:
            zygote.start_early()  # its imports run in parallel with ours
        from veldt.experiment.populations.quantum import run_quantum

        outcome = run_quantum(Path(job["config_file"]), Path(job["run"]), int(job["until"]))
        replies.write(json.dumps(asdict(outcome)) + "\n")
        replies.flush()
        if job["local"]:
            zygote.start_early()  # for the next quantum, while others are trained
