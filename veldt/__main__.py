"""The `veldt` command."""

import atexit
import contextlib
import errno
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from veldt import __version__
from veldt.errors import Diverged, EnvError, ProcessFailed, Untrusted, UserError, did_you_mean
from veldt.foreign import printable, read_text
from veldt.machine import runs_processes
from veldt.signals import exits_at_once

COMMANDS = {
    "recipes": "list the recipes that can be trained",
    "train": "train a recipe: veldt train apex-dqn --env CartPole-v1",
    "resume": "continue a run: veldt resume runs/my-run",
    "actor": "act for a run on another machine: veldt actor --connect HOST:PORT --token-file FILE",
    "eval": "play greedy episodes with the last weights: veldt eval runs/my-run --episodes 20",
    "record": "record demonstrations: veldt record --policy module:callable --env ID --episodes 20 -o demos/mine",
    "demos": "describe demonstrations: veldt demos demos/mine",
    "plot": "draw learning curves: veldt plot runs/* -o curves.png",
    "metrics": "print the metrics of a run, also as CSV: veldt metrics runs/my-run --csv",
    "report": "make a results page: veldt report runs/* -o results",
    "top": "watch a run: veldt top runs/my-run",
    "sweep": "train many settings and seeds: veldt sweep FILE.yaml",
    "pbt": "population-based training: veldt pbt FILE.yaml",
    "tune": "search for settings with Optuna: veldt tune FILE.yaml",
    "plan": "predict a run with other numbers of actors: veldt plan runs/my-run --actors 10 100 1000",
    "bench": "measure this machine: veldt bench learner",
}

CODE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")  # module:function
UNUSABLE = errno.EACCES, errno.EPERM, errno.ENAMETOOLONG  # of a path that the user named
LONGEST = 4_000  # characters of an error
LISTED = "\n".join(f"  {name:8} {text}" for name, text in COMMANDS.items())
USAGE = f"""Veldt {__version__}: distributed off-policy deep reinforcement learning.

usage: veldt COMMAND ...

{LISTED}

veldt COMMAND --help shows all options."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 success, 1 an error in Veldt or an environment, 2 a mistake of the user, 130 interrupted."""
    with exits_at_once() as imported:
        return _run(sys.argv[1:] if argv is None else argv, imported)


def _run(argv: list[str], imported: Callable[[], None]) -> int:
    from veldt.runtime.local import zygote  # here: it imports NumPy

    # Set before torch is imported: threads that spin take cores from the environments.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "--trust" in argv or any(CODE.fullmatch(word.rpartition("=")[2]) for word in argv):
        sys.path.append(os.getcwd())  # last: it hides no installed module
    try:
        if not argv or argv[0] in ("-h", "--help", "help"):
            print(USAGE)
            return 0
        if argv[0] == "--version":
            print(__version__)
            return 0
        if argv[0] not in COMMANDS:
            raise UserError(f"There is no command {argv[0]!r}.{did_you_mean(argv[0], COMMANDS, COMMANDS)}")
        if _wants_processes(argv):
            zygote.start_early()  # its imports run in parallel with ours
            if {"seed-vtrace", "central", "--inference=central"} & set(argv):
                zygote.start_early(light=True)
        command = importlib.import_module(f"veldt.cli.{argv[0]}")
        if argv[0] not in ("train", "resume"):  # a run has nothing to save either, until it handles signals itself
            imported()
        return int(command.run(argv[1:]))
    except (UserError, Diverged) as error:
        print(f"veldt: {printable(_sentences(error))[:LONGEST]}", file=sys.stderr)
        if isinstance(error, Untrusted):
            print(f"veldt: the command is then: {shlex.join(['veldt', *argv, '--trust'])}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except (ProcessFailed, EnvError) as error:
        print(f"{_traceback(error)}veldt: {_sentences(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        if not hasattr(error, "code"):  # that of a run, which has said where it goes on
            print("veldt: interrupted", file=sys.stderr)
        return int(getattr(error, "code", 130))
    except BrokenPipeError:  # the reader of our output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in UNUSABLE or error.filename is None:
            raise
        print(f"veldt: {printable(str(error.filename))[:200]} cannot be used ({error.strerror}).", file=sys.stderr)
        return 2
    finally:
        zygote.discard()


def command() -> None:
    """The whole process. It ends when its work has, without the half a second that Python needs to take torch apart."""
    code = main()
    atexit._run_exitfuncs()  # those of libraries and of the user's own modules
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _sentences(error: Exception) -> str:
    """The error, and what was noted on it: in one line."""
    notes = getattr(error, "__notes__", ())
    return ". ".join([str(error).rstrip("."), *notes]).replace("?. ", "? ") if notes else str(error)


def _traceback(error: ProcessFailed | EnvError) -> str:
    """That of the process or environment, unless the log of a run has it."""
    if isinstance(error, ProcessFailed):
        return error.traceback
    return "" if hasattr(error, "__notes__") else "".join(traceback.format_exception(error.__cause__))


def _wants_processes(argv: list[str]) -> bool:
    """Guesses from the arguments whether the local runtime will be used."""
    if not runs_processes():
        return False
    if {"-h", "--help", "inline", "--runtime=inline"} & set(argv):
        return False
    if argv[0] == "resume":
        try:
            return "\nruntime: local\n" in read_text(Path(argv[1]) / "config.yaml")
        except (OSError, IndexError, UnicodeDecodeError):
            return False
    return argv[0] == "train" and "".join(argv[1:2]) not in ("", "dqn") and not argv[1].startswith("-")


if __name__ == "__main__":
    command()
