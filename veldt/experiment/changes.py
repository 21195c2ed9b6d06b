"""Which settings of a run may change when it is resumed, and why that is sound; and the record of what did.

All others are part of what a checkpoint holds (the network, the blocks of the store), or of what the run is about.
"""

import json
import os
from pathlib import Path
from typing import Any

from veldt.errors import writing
from veldt.experiment.config import Config
from veldt.experiment.settings import flat
from veldt.foreign import regular

FILE = "config_history.jsonl"

# How a run is carried out. Repeating the command that started it may change these too.
HOW_IT_RUNS = {
    "steps": "a schedule over the run (learner.anneal, store.beta_end) goes on from where it is in the new length",
    "stop_return": "it is compared with new evaluations only",
    "stop_after": "it counts from the resume",
    "queue": "what is queued is not saved",
    "transport": "what is under way is not saved",
    "gate.listen": "who joins is not saved",
    "gate.token_file": "who joins is not saved",
    "gate.certificate": "who joins is not saved",
    "gate.key": "who joins is not saved",
    "gate.compress": "it changes no value",
    "log.every": "it changes no value",
    **dict.fromkeys((f"log.wandb{name}" for name in ("", "_project", "_entity", "_group", "_tags")), "it changes no value"),
    **dict.fromkeys((f"log.mlflow{name}" for name in ("", "_uri", "_experiment")), "it changes no value"),
    "checkpoint.keep": "older checkpoints are deleted with the next one",
    "checkpoint.store": "a checkpoint says which of both it is",
    "restart.limit": "restarts are not saved",
    "restart.delay": "restarts are not saved",
    "restart.window": "restarts are not saved",
    "memory.limit": "it changes no value",
    "memory.reserve": "it changes no value",
    "threads": "only the rounding of sums",
    "device": "only the rounding of sums",
    "store.device": "only where samples are gathered",
    "learner.graph": "only how operations are launched",
    "eval.episodes": "evaluations change nothing in training",
    "step_timeout": "it changes no value",
    "max_bad": "it is compared with new observations only",
}

# What it learns from here on: only `veldt resume` changes these.
WHAT_IT_LEARNS = {
    "learner.lr": "the moments of the optimizer do not depend on it",
    "learner.anneal": "the rate follows from the env steps, and is not saved",
    "learner.eps": "the moments of the optimizer do not depend on it",
    "learner.clip_norm": "it is applied to each gradient by itself",
    "learner.batch": "items are sampled one by one; the replay ratio stays",
    "learner.target_every": "the target is a copy of the weights at any age",
    "learner.publish_every": "policies take the newest weights at any age",
    "store.beta": "importance weights are computed for each batch",
    "store.beta_end": "importance weights are computed for each batch",
    "actor.epsilon": "the store holds what other amounts of exploration found anyway",
    "actor.epsilon_end": "the same",
    "actor.epsilon_steps": "the same",
    "actor.alpha": "the same",
    "actor.sigma": "the same",
    "actor.hold": "the same",
    "actor.refresh": "policies take the newest weights at any age",
    "algorithm.entropy_cost": "a weight in the loss",
    "algorithm.baseline_cost": "a weight in the loss",
    "eval.every": "evaluations change nothing in training",
    "eval.epsilon": "evaluations change nothing in training",
    "eval.max_length": "evaluations change nothing in training",
    "checkpoint.every": "a checkpoint can be taken at any time",
}

ON_RESUME = HOW_IT_RUNS | WHAT_IT_LEARNS


def differences(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """The settings that have changed, with both values."""
    old, new = flat(before), flat(now)
    return {name: (old.get(name), new[name]) for name in new if old.get(name) != new[name]}


def record(directory: Path, env_steps: int, changed: dict[str, tuple[Any, Any]]) -> None:
    line = json.dumps({"env_steps": env_steps, "changed": {name: list(values) for name, values in changed.items()}})
    with writing(directory / FILE), open(directory / FILE, "a", opener=regular) as file:
        file.write(f"{line}\n")
        file.flush()
        os.fsync(file.fileno())


def sentences(changed: dict[str, tuple[Any, Any]], now: Config, env_steps: int) -> list[str]:
    """What is printed of the changes: one line each, and what becomes of the learning rate."""
    shown = {name: [repr(x) if x == "" else x for x in values] for name, values in changed.items()}
    lines = [f"changed: {name} was {old}, and is {new} from here on" for name, (old, new) in shown.items()]
    learner = now.learner
    if changed.keys() & {"steps", "learner.anneal", "learner.lr"} and (learner.anneal or "learner.anneal" in changed):
        steps, lr, anneal = (
            changed.get(name, (value,))[0]
            for name, value in (("steps", now.steps), ("learner.lr", learner.lr), ("learner.anneal", learner.anneal))
        )
        before = lr * max(0.0, 1 - env_steps / steps) if anneal else lr
        after = learner.lr * max(0.0, 1 - env_steps / now.steps) if learner.anneal else learner.lr
        falls = f", and falls to 0 at {now.steps:,} env steps" if learner.anneal else ""
        lines.append(f"learning rate: it was {before:.3g} here; it goes on at {after:.3g}{falls}")
    return lines
