"""Which environments Veldt takes: the ids of the installed packages with every recipe that fits, for a few steps each.

    python benchmarks/compatibility.py --quick                    # one id of each family, 200 steps
    python benchmarks/compatibility.py --families minigrid mujoco --out compatibility
    python benchmarks/compatibility.py --again traceback hang     # only those that ended so before

Ids of a family that differ in a level, a size or a reward are alike. Of each family the first id is run with every recipe
that fits its actions, and of all that are alike the first with two of them in turn (`--all`: every id with every recipe).
Each other id is stepped without training.

Each run is a process of its own with a time limit: a fork of one that has imported Veldt, but for the first of each family,
which is a command. It works, is refused in a sentence, ends with a traceback, hangs, or has bad data: dropped observations,
observations that never change while no episode ends, or a loss that is not finite. What was done is in OUT.jsonl, and is
not done again. OUT.md is the table.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"SDL_VIDEODRIVER": "dummy", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

Job = tuple[str, str, str]  # family, id, recipe; an empty recipe: the environment alone
Row = dict[str, Any]


class Family(NamedTuple):
    module: str  # registers its ids; "" for Gymnasium itself
    ids: str  # a pattern
    alike: str = ""  # what may differ between ids that are alike, as a pattern
    options: tuple[str, ...] = ()  # of `veldt train`
    names: tuple[str, ...] = ()  # in place of the ids
    every: int = 1  # so many of the ids that are alike are tried


FAMILIES = {
    "classic": Family("", r"(CartPole|MountainCar|MountainCarContinuous|Acrobot|Pendulum)-v"),
    "toy-text": Family("", r"(FrozenLake|FrozenLake8x8|Taxi|Blackjack|CliffWalking|CliffWalkingSlippery)-v"),
    "box2d": Family("", r"(LunarLander|LunarLanderContinuous|BipedalWalker|BipedalWalkerHardcore|CarRacing)-v"),
    "mujoco": Family(
        "",
        r"(Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedPendulum|InvertedDoublePendulum|Pusher|Reacher|Swimmer|"
        r"Walker2d)-v[45]",
    ),
    "ale": Family("ale_py", r"ALE/.*-v5"),
    "minatar": Family("minatar.gym", r"MinAtar/"),
    "veldt": Family("veldt.envs", r"veldt/"),
    "minigrid": Family("minigrid", r"(MiniGrid|BabyAI)-", r"-?([SNR]\d+|\d+x\d+|\d+|Debug|Random)"),
    "highway-env": Family(
        "highway_env",
        r"(highway|merge|roundabout|parking|intersection|racetrack|exit|lane-keeping|two-way|u-turn)-",
        r"-(fast|generic|large|oval|parked|ActionRepeat)",
    ),
    "gymnasium-robotics": Family(
        "gymnasium_robotics",
        r"(Fetch|Hand|AntMaze|PointMaze|Adroit|FrankaKitchen)",
        r"(Dense|Sparse|_(Medium|Large|Open|UMaze|Diverse|GR|G)|Rotate.*|Full|_Touch)",
    ),
    "panda-gym": Family("panda_gym", r"Panda", r"Dense"),
    "flappy-bird": Family("flappy_bird_gymnasium", r"FlappyBird-"),
    "metaworld": Family("metaworld", r"Meta-World/MT1$", options=("--env-kwargs", "env_name=reach-v3")),
    "vizdoom": Family(
        "vizdoom.gymnasium_wrapper",
        r"Vizdoom",
        r"(Doom2?|Freedoom\d?)?(MAP\d+|E\dM\d)(-S\d)?",
        ("--image-size", "84", "--grayscale"),
        every=100,
    ),
    "popgym": Family("popgym", r"popgym-", r"(Easy|Medium|Hard)"),
    "bsuite": Family("shimmy", r"bsuite/(?!compat)", r"_(noise|scale)"),
    "dm_control": Family("shimmy", r"dm_control/(?!compat)", r"-.*|_(features|vision)"),
    "envpool": Family(  # it has a registry of its own
        "envpool", r"$^", options=("--env-kwargs", "task_id=CartPole-v1", "num_envs=1"), names=("envpool:make_gymnasium",)
    ),
}
ACTOR_CRITIC = ("impala", "seed-vtrace")
RECIPES = ("dqn", "apex-dqn", "r2d2", "apex-dpg", *ACTOR_CRITIC)
SMALL = ["--store.capacity", "2_000", "--store.min-size", "100", "--store.samples-per-insert", "2", "--learner.batch", "8"]
ENOUGH = 1_000  # env steps after which a recipe has learned
SLOW = 100.0  # env steps/s below which a run has fewer steps
KINDS = ("works", "refused", "traceback", "hang", "bad data")


def main() -> None:
    args = read_arguments()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import veldt.cli.train  # what runs are forked from

    assert veldt
    log = args.out.with_suffix(".jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    done = {(row["family"], row["env"], row["recipe"]): row for row in rows}
    done = {job: row for job, row in done.items() if row["result"] not in args.again}
    began = os.times()
    with open(log, "a", buffering=1) as file:
        for family in args.families:
            for row in try_family(family, args, done):
                done[row["family"], row["env"], row["recipe"]] = row
                file.write(json.dumps(row) + "\n")
                print(*(row[key] for key in ("family", "env", "recipe", "result", "seconds", "said")), flush=True)
            write(args.out, list(done.values()), args.steps)
    spent = sum(os.times()[:4]) - sum(began[:4])
    print(args.out.with_suffix(".md").read_text(), f"{spent:,.0f} s of CPU")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one id of each family, 200 steps, three recipes")
    parser.add_argument("--all", action="store_true", help="every id with every recipe that fits")
    parser.add_argument("--steps", type=int, default=0, help="env steps of each run (default: 2,000; 200 with --quick)")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), help="only these")
    parser.add_argument("--recipes", nargs="*", default=RECIPES, choices=RECIPES, help="only these")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a run may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="go on to the next family after so many")
    parser.add_argument("--again", nargs="*", default=(), choices=KINDS, help="do these again")
    parser.add_argument("--out", type=Path, default=Path("compatibility"), help="OUT.md and OUT.jsonl")
    args = parser.parse_args()
    args.steps = args.steps or (200 if args.quick else 2_000)
    args.out = args.out.resolve()
    return args


def try_family(name: str, args: argparse.Namespace, done: dict[Job, Row]) -> Iterator[Row]:
    family, began = FAMILIES[name], time.monotonic()
    ids, why = names_of(family)
    if not ids:
        if (name, "", "") not in done:
            yield {"family": name, "env": "", "recipe": "", "result": "absent", "said": why, "seconds": 0.0}
        return
    order = ids[:1] if args.quick else in_order(ids, family)
    groups = set[str]()
    for number, env in enumerate(order):
        first = alike(env, family) not in groups
        groups.add(alike(env, family))
        if time.monotonic() - began > args.seconds:
            return
        job = (name, env, "")
        probed = done.get(job)
        if probed is None:
            probed = probe(name, env, args)
            yield probed
        if number == 0 and family.module:
            with contextlib.suppress(Exception):  # later forks need not import it
                importlib.import_module(family.module)
        if probed["result"] not in ("works", "bad data"):
            continue
        recipes = [x for x in args.recipes if x in ACTOR_CRITIC or (x == "apex-dpg") == probed["continuous"]]
        if number and not args.all:
            recipes = in_turn(recipes, number) if first else []
        steps = args.steps if probed["rate"] > SLOW else max(200, int(20 * probed["rate"]))
        for recipe in recipes:
            if (name, env, recipe) not in done:
                command = number == 0 and recipe == recipes[0]
                yield train(name, env, recipe, min(steps, args.steps), args.limit, command)


def alike(env: str, family: Family) -> str:
    return re.sub(family.alike, "", env.rpartition("-v")[0]) if family.alike else env


def in_order(ids: list[str], family: Family) -> list[str]:
    """First one of each that are alike, then the others, or some of them."""
    firsts = list({alike(env, family): env for env in reversed(ids)}.values())[::-1]
    return firsts + [env for env in ids if env not in firsts][:: family.every]


def in_turn(recipes: list[str], number: int) -> list[str]:
    """A recipe that learns values, and one with a critic."""
    kinds = [[x for x in recipes if x not in ACTOR_CRITIC], [x for x in recipes if x in ACTOR_CRITIC]]
    return [kind[number % len(kind)] for kind in kinds if kind]


def names_of(family: Family) -> tuple[list[str], str]:
    """The newest version of each id, as `veldt train --env` gets it; or why there are none."""
    if family.names:
        return list(family.names), ""
    code = (
        "import importlib, json, gymnasium as gym\n"
        f"m = importlib.import_module({family.module!r}) if {family.module!r} else None\n"
        "names = ('register_envs', 'register_robotics_envs', 'register_gymnasium_envs')\n"
        "[getattr(m, f)() for f in names if hasattr(m, f)]\n"
        "print(json.dumps([s for s in gym.registry]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if done.returncode:
        return [], (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
    newest: dict[str, tuple[int, str]] = {}
    for name in json.loads(done.stdout.splitlines()[-1]):
        if re.match(family.ids, name):
            stem, _, version = name.rpartition("-v")
            key, number = (stem, int(version)) if version.isdigit() and stem else (name, 0)
            newest[key] = max(newest.get(key, (-1, "")), (number, name))
    return sorted(name for _, name in newest.values()), "it registers no such ids in Gymnasium"


# The environment alone, in a process of its own.


def probe(family: str, env: str, args: argparse.Namespace) -> Row:
    kwargs = [word for word in FAMILIES[family].options if "=" in word]
    began = time.monotonic()
    result, said, out = in_fork(lambda: step_alone(env, min(300, args.steps), kwargs), args.limit)
    row: Row = {"family": family, "env": env, "recipe": "", "seconds": round(time.monotonic() - began, 1)}
    if result != "works":
        return row | {"result": result, "said": said}
    seen = json.loads(out.splitlines()[-1])
    if seen["bad"]:
        result, said = "bad data", f"{seen['bad']} dropped observations"
    elif seen["constant"]:
        result, said = "bad data", "no observation ever changed, and no episode ended"
    return row | {"result": result, "said": said, "rate": seen["rate"], "continuous": seen["action"] == "Box"}


def step_alone(env: str, steps: int, kwargs: list[str]) -> int:
    import numpy as np

    from veldt.envs import make_env
    from veldt.errors import UserError

    try:
        envs = make_env(env, 1, kwargs=kwargs)
        space, rng = envs.spec.action_space, np.random.default_rng(0)
        space.seed(0)
        record = envs.reset(0)
        seen = {key: record[key].copy() for key in envs.spec.observation}
        changed: set[str] = set()
        ends, began = 0, time.monotonic()
        for _ in range(steps):
            action = np.asarray(space.sample())[None] - np.asarray(getattr(space, "start", 0))
            if envs.spec.mask and hasattr(space, "n"):
                action = np.array([rng.choice(np.flatnonzero(record["action_mask"][0]))])
            record = envs.step(action)
            ends += int(record["last"][0])
            changed |= {key for key in seen if not np.array_equal(seen[key], record[key])}
    except UserError as error:
        print(f"veldt: {error}", file=sys.stderr)
        return 2
    rate = steps / (time.monotonic() - began)
    said = {"bad": int(envs.bad), "constant": not changed and not ends, "rate": round(rate)}
    print(json.dumps(said | {"action": type(space).__name__}))
    return 0


# A training.


def train(family: str, env: str, recipe: str, steps: int, limit: float, command: bool) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        words = ["train", recipe, "--env", env, "--steps", str(steps), "--quiet", *FAMILIES[family].options]
        words += ["--run", f"{directory}/run", "--envs-per-actor", "2", "--eval.every", "0", "--runtime", "inline"]
        words += [] if recipe in ACTOR_CRITIC else SMALL
        if recipe == "r2d2":
            words[words.index("--store.min-size") + 1] = "10"
        began = time.monotonic()
        result, said, _ = as_command(words, limit) if command else in_fork(lambda: run_veldt(words), limit)
        seconds = round(time.monotonic() - began, 1)
        file = Path(directory, "run", "metrics.jsonl")
        lines = file.read_text().splitlines() if file.exists() else []
    last: Row = {}
    for line in lines:
        last |= json.loads(line)
    if result == "works":
        result, said = what_came(last, steps)
    row: Row = {"family": family, "env": env, "recipe": recipe, "steps": steps}
    return row | {"result": result, "said": said, "seconds": seconds}


def what_came(last: Row, steps: int) -> tuple[str, str]:
    loss = last.get("loss")
    if last.get("bad_observations"):
        return "bad data", f"{last['bad_observations']:g} dropped observations"
    if last.get("env_steps", 0) < steps or (not last.get("learner_steps") and steps >= ENOUGH):
        return "bad data", f"{last.get('env_steps', 0):g} env steps and {last.get('learner_steps', 0):g} updates were done"
    if not last.get("learner_steps"):
        return "works", ""
    if loss is None or not math.isfinite(loss):
        return "bad data", f"the loss is {loss}"
    return "works", ""


def run_veldt(words: list[str]) -> int:
    from veldt.__main__ import main as veldt_main

    return veldt_main(words)


def as_command(words: list[str], limit: float) -> tuple[str, str, str]:
    command = [sys.executable, "-m", "veldt", *words]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return in_fork(lambda: os.execve(sys.executable, command, os.environ | {"PYTHONPATH": paths}), limit)


def in_fork(work: Callable[[], int], limit: float) -> tuple[str, str, str]:
    """works, refused, traceback or hang; what was said; the output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(out.fileno(), 1)
            os.dup2(error.fileno(), 2)
            code = 1
            try:
                code = work()
            except BaseException:
                importlib.import_module("traceback").print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end = time.monotonic() + limit
        while not (found := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.killpg(pid, 9)
                os.waitpid(pid, 0)
                return "hang", f"more than {limit:g} s", ""
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, 9)  # what it left behind
        out.seek(0), error.seek(0)
        output, lines = out.read(), error.read().strip().splitlines() or [""]
    if found[1] == 0:
        return "works", "", output
    said = next((line for line in lines if line.startswith("veldt: ")), "")
    if said and not any(line.startswith("Traceback") for line in lines):
        return "refused", said.removeprefix("veldt: "), output
    return "traceback", f"{said} {lines[-1]}"[:300], output


def write(out: Path, found: list[Row], steps: int) -> None:
    """Counts of runs by family, and what did not work."""
    lines = [f"| family | ids | alike | {' | '.join(KINDS)} | recipes that worked |", "|---" * (4 + len(KINDS)) + "|"]
    for family in dict.fromkeys(row["family"] for row in found):
        rows = [row for row in found if row["family"] == family]
        counts = collections.Counter(row["result"] for row in rows)
        ids = {row["env"] for row in rows if row["env"]}
        groups = {alike(env, FAMILIES[family]) for env in ids}
        recipes = collections.Counter(row["recipe"] for row in rows if row["result"] == "works" and row["recipe"])
        worked = ", ".join(f"{recipe} {recipes[recipe]}" for recipe in RECIPES if recipes[recipe])
        cells = [str(counts[kind] or "") for kind in KINDS]
        lines.append(f"| {family} | {len(ids) or 'none'} | {len(groups) or ''} | {' | '.join(cells)} | {worked} |")
    lines.append("")
    sentences: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        if row["result"] != "works":
            where = re.sub(r"\s+", " ", row["said"].replace(row["env"] or "\0", "ENV"))
            sentences.setdefault((row["family"], row["result"], where), []).append(row)
    for (family, result, said), rows in sentences.items():
        recipes = ", ".join(sorted({row["recipe"] for row in rows} - {""}))
        names = sorted({row["env"] for row in rows})
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"- {family}: {shown}{f' ({recipes})' if recipes else ''}: **{result}**: {said}")
    text = f"{len([x for x in found if x['recipe']]):,} trainings of {steps:,} steps, {len(found):,} runs in all.\n\n"
    out.with_suffix(".md").write_text(text + "\n".join(lines) + f"\n\nVersions: {versions()}.\n")


def versions() -> str:
    names = ("gymnasium", "torch", "numpy", "ale-py", "MinAtar", "mujoco", "minigrid", "highway-env", "gymnasium-robotics",
             "panda-gym", "flappy-bird-gymnasium", "metaworld", "vizdoom", "popgym", "bsuite", "shimmy", "dm-control",
             "envpool")  # fmt: skip
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


if __name__ == "__main__":
    main()
