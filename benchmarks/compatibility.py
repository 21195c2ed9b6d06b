"""Which environments Veldt takes: every id of the installed packages, with every recipe that fits, for a few steps each.

    python benchmarks/compatibility.py --quick                    # one id of each family, 200 steps
    python benchmarks/compatibility.py --families minigrid mujoco --out compatibility

Each run is a process of its own with a time limit. It works, is refused in a sentence, ends with a traceback, hangs, or has
bad data: dropped observations, or a column that never changes while no episode ends. Packages that are not installed are
named. Writes OUT.md, by family, and OUT.json.
"""

import argparse
import collections
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Family -> the module that registers its ids ("" for Gymnasium itself), a pattern of the ids, arguments.
FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "classic": ("", r"(CartPole|MountainCar|MountainCarContinuous|Acrobot|Pendulum)-v", ()),
    "toy-text": ("", r"(FrozenLake|FrozenLake8x8|Taxi|Blackjack|CliffWalking|CliffWalkingSlippery)-v", ()),
    "box2d": ("", r"(LunarLander|LunarLanderContinuous|BipedalWalker|BipedalWalkerHardcore|CarRacing)-v", ()),
    "mujoco": ("", r"(Ant|HalfCheetah|Hopper|Humanoid|HumanoidStandup|InvertedPendulum|InvertedDoublePendulum|"
               r"Pusher|Reacher|Swimmer|Walker2d)-v[45]", ()),
    "ale": ("ale_py", r"ALE/.*-v5", ()),
    "minatar": ("minatar.gym", r"MinAtar/", ()),
    "veldt": ("veldt.envs", r"veldt/", ()),
    "minigrid": ("minigrid", r"(MiniGrid|BabyAI)-", ()),
    "highway-env": ("highway_env", r"(highway|merge|roundabout|parking|intersection|racetrack|exit|lane-keeping|two-way|"
                    r"u-turn)-", ()),
    "gymnasium-robotics": ("gymnasium_robotics", r"(Fetch|Hand|AntMaze|PointMaze|Adroit|FrankaKitchen)", ()),
    "panda-gym": ("panda_gym", r"Panda", ()),
    "flappy-bird": ("flappy_bird_gymnasium", r"FlappyBird-", ()),
    "metaworld": ("metaworld", r"Meta-World/MT1$", ("env_name=reach-v3",)),
    "vizdoom": ("vizdoom.gymnasium_wrapper", r"Vizdoom", ()),
    "popgym": ("popgym", r"popgym-", ()),
    "bsuite": ("shimmy", r"bsuite/", ()),
    "dm_control": ("shimmy", r"dm_control/", ()),
    "envpool": ("envpool", r"$^", ()),  # it has a registry of its own
}  # fmt: skip
RECIPES = ("dqn", "apex-dqn", "apex-dpg", "r2d2", "impala", "seed-vtrace")
QUICK = ("dqn", "apex-dpg", "impala")
SMALL = ["--store.capacity", "2_000", "--store.min-size", "100", "--learner.batch", "8"]
PROBE = """
import json, sys
import gymnasium as gym
import numpy as np
from veldt.envs import make_env
name, steps, kwargs = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
envs = make_env(name, 1, kwargs=kwargs)
space, rng = envs.spec.action_space, np.random.default_rng(0)
space.seed(0)
record = envs.reset(0)
seen = {key: record[key].copy() for key in envs.spec.observation}
changed, ends = set(), 0
for _ in range(steps):
    action = np.asarray(space.sample())[None]
    record = envs.step(action - np.asarray(getattr(space, "start", 0)))
    ends += int(record["last"][0])
    changed |= {key for key in seen if not np.array_equal(seen[key], record[key])}
said = {"bad": int(envs.bad), "constant": sorted(set(seen) - changed), "episodes": ends, "action": type(space).__name__}
said["notices"] = envs.spec.notices
print(json.dumps(said))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one id of each family, 200 steps, three recipes")
    parser.add_argument("--steps", type=int, default=0, help="env steps of each run (default: 2,000; 200 with --quick)")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=list(FAMILIES), help="only these")
    parser.add_argument("--recipes", nargs="*", default=None, choices=RECIPES, help="only these")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a run may take")
    parser.add_argument("--out", type=Path, default=Path("compatibility"), help="OUT.md and OUT.json")
    args = parser.parse_args()
    steps = args.steps or (200 if args.quick else 2_000)
    found: list[dict[str, Any]] = []
    for family in args.families:
        module, pattern, kwargs = FAMILIES[family]
        ids, why = names_of(module, pattern)
        if not ids:
            found.append({"family": family, "env": "", "recipe": "", "result": "absent", "said": why})
        for env in ids[:1] if args.quick else ids:
            print(f"{family}: {env}", flush=True)
            found += check(family, env, kwargs, steps, args.limit, args.recipes or (QUICK if args.quick else RECIPES))
            write(args.out, found, steps)
    write(args.out, found, steps)
    print(args.out.with_suffix(".md").read_text())


def names_of(module: str, pattern: str) -> tuple[list[str], str]:
    """The newest version of each id, as `veldt train --env` gets it; or why there are none."""
    code = (
        "import importlib, json, gymnasium as gym\n"
        f"m = importlib.import_module({module!r}) if {module!r} else None\n"
        "names = ('register_envs', 'register_robotics_envs', 'register_gymnasium_envs')\n"
        "[getattr(m, f)() for f in names if hasattr(m, f)]\n"
        "print(json.dumps([s for s in gym.registry]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if done.returncode:
        return [], (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
    newest: dict[str, tuple[int, str]] = {}
    for name in json.loads(done.stdout.splitlines()[-1]):
        if re.match(pattern, name):
            stem, _, version = name.rpartition("-v")
            key, number = (stem, int(version)) if version.isdigit() and stem else (name, 0)
            newest[key] = max(newest.get(key, (-1, "")), (number, name))
    return sorted(name for _, name in newest.values()), "it registers no such ids in Gymnasium"


def check(
    family: str, env: str, kwargs: tuple[str, ...], steps: int, limit: float, recipes: tuple[str, ...]
) -> list[dict[str, Any]]:
    """First the environment alone, which shows bad data and the recipes that fit."""
    row = {"family": family, "env": env}
    result, said, out = run([sys.executable, "-c", PROBE, env, str(steps), *kwargs], limit)
    if result != "works":
        return [row | {"recipe": "(environment)", "result": result, "said": said}]
    seen = json.loads(out.splitlines()[-1])
    rows = []
    if seen["bad"]:
        rows.append(row | {"recipe": "(environment)", "result": "bad data", "said": f"{seen['bad']} dropped observations"})
    if seen["constant"] and not seen["episodes"]:
        rows.append(
            row | {"recipe": "(environment)", "result": "bad data", "said": f"constant: {', '.join(seen['constant'])}"}
        )
    continuous = seen["action"] == "Box"
    fit = [x for x in recipes if x in ("impala", "seed-vtrace") or (x == "apex-dpg") == continuous]
    return rows + [row | train(env, kwargs, recipe, steps, limit) for recipe in fit]


def train(env: str, kwargs: tuple[str, ...], recipe: str, steps: int, limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "veldt", "train", recipe, "--env", env, "--steps", str(steps), "--quiet"]
        command += ["--run", f"{directory}/run", "--envs-per-actor", "2", "--eval.every", "0", "--runtime", "inline"]
        command += ["--env-kwargs", *kwargs] if kwargs else []
        command += [] if recipe in ("impala", "seed-vtrace") else SMALL
        if recipe == "r2d2":
            command[command.index("--store.min-size") + 1] = "10"
        began = time.monotonic()
        result, said, _ = run(command, limit)
        file = Path(directory, "run", "metrics.jsonl")
        lines = file.read_text().splitlines() if file.exists() else []
        last = json.loads(lines[-1]) if lines else {}
    if result == "works" and last.get("bad_observations"):
        result, said = "bad data", f"{last['bad_observations']:g} dropped observations"
    return {"recipe": recipe, "result": result, "said": said, "seconds": round(time.monotonic() - began, 1)}


def run(command: list[str], limit: float) -> tuple[str, str, str]:
    """works, refused, traceback or hang; what was said; the output."""
    environment = os.environ | {"SDL_VIDEODRIVER": "dummy", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        try:
            out, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "hang", f"more than {limit:g} s", ""
    lines = error.strip().splitlines() or [""]
    if process.returncode == 0:
        return "works", "", out
    said = next((line for line in lines if line.startswith(("veldt: ", "veldt.errors.UserError: "))), "")
    if said and (said.startswith("veldt.errors") or "Traceback" not in error):
        return "refused", said.partition(": ")[2], out
    return "traceback", lines[-1][:300], out


def write(out: Path, found: list[dict[str, Any]], steps: int) -> None:
    kinds = ("works", "refused", "traceback", "hang", "bad data")
    lines = [f"# Environments, {steps:,} steps each\n", f"| family | ids | {' | '.join(kinds)} |", "|---" * 7 + "|"]
    for family in dict.fromkeys(row["family"] for row in found):
        rows = [row for row in found if row["family"] == family]
        counts = collections.Counter(row["result"] for row in rows)
        ids = len({row["env"] for row in rows if row["env"]})
        lines.append(f"| {family} | {ids or 'not installed'} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
    lines.append("\nCounts are of runs: an id with each recipe that fits its actions.\n")
    others = [row for row in found if row["result"] != "works"]
    lines += [f"- {row['family']} {row['env']} {row['recipe']}: **{row['result']}**: {row['said']}" for row in others]
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    out.with_suffix(".json").write_text(json.dumps({"steps": steps, "versions": versions(), "runs": found}, indent=1))


def versions() -> dict[str, str]:
    modules = {module.partition(".")[0] for module, _, _ in FAMILIES.values() if module} | {"gymnasium", "numpy", "torch"}
    return {name: str(getattr(sys.modules.get(name), "__version__", "")) or _version(name) for name in sorted(modules)}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
