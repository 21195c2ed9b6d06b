"""Transplants: what one run has learned, moved into another run of the same kind, which goes on with it.

    moved       weights (with the statistics of normalisation), target network, averages of the optimizer
    stays       the store (unless it is asked for), counts of steps and updates, random streams; so every schedule

It is a new checkpoint of the run that receives, next to its last one: there as a whole or not at all.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from veldt.errors import UserError
from veldt.experiment.checkpoint import Checkpoint, Checkpoints
from veldt.files import Corrupt
from veldt.runtime.base import ARRAYS

LEARNED = ("weights/", "target/", "optimizer/", "observed")  # names in the state of any node; `observed`: by es
CARRIED = ("format", "time_s", "env_steps", "learner_steps", "scheduled", "blocks")  # of the manifest

State = dict[str, dict[str, Any]]


def is_learned(node: str, name: str, value: Any) -> bool:
    """Of the arrays that belong to a whole program, those of floats are weights and averages; integers are counts."""
    if node == ARRAYS or node.startswith(f"{ARRAYS}/"):
        return isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return name.startswith(LEARNED)


def transplant(recipient: Path, own: int, donor: Path, theirs: int, note: dict[str, Any], store: bool = False) -> int:
    """From checkpoint `theirs` of the run `donor`, over checkpoint `own` of the run `recipient`, whose last one that is.
    Returns the number of the new checkpoint. `note` is added to its manifest."""
    checkpoints, source = Checkpoints(recipient / "checkpoints"), Checkpoints(donor / "checkpoints")
    checkpoints.clean()
    before, given = _read(checkpoints, own), _read(source, theirs)
    state, received = _state(before), _state(given)
    for node, part in state.items():
        _replace_learned(node, part, received.get(node, {}), donor)
        if part.keys() >= {"returns", "lengths"}:  # an actor's: of other weights
            part |= {"returns": [], "lengths": []}
    carried = {name: before.manifest[name] for name in CARRIED if name in before.manifest}
    if store:
        carried["blocks"] = {
            name: _copy_store(name, state, received, given, source, checkpoints) for name in carried["blocks"]
        }
    checkpoints.add(state, {**carried, "number": own + 1, "transplant": note})
    return own + 1


def _read(checkpoints: Checkpoints, number: int) -> Checkpoint:
    try:
        return checkpoints.at(number)
    except Corrupt as error:
        raise UserError(f"{checkpoints.directory / f'{number:06d}'} cannot be copied: {error}.") from None


def _state(checkpoint: Checkpoint) -> State:
    try:
        return checkpoint.state()
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.path} cannot be copied: {type(error).__name__}, {error}.") from None


def _replace_learned(node: str, part: dict[str, Any], received: dict[str, Any], donor: Path) -> None:
    """A run that has made no update yet has no averages, so the names are those of the donor."""
    own, theirs = ({name: x for name, x in state.items() if is_learned(node, name, x)} for state in (part, received))
    for name, x in own.items():
        other = theirs.get(name)
        if np.shape(other) != np.shape(x) if other is not None else not name.startswith("optimizer/"):
            raise UserError(f"{donor} is a run of another kind: it has no {name} of {node} with the shape that is needed.")
        del part[name]
    part |= theirs


def _copy_store(
    name: str, state: State, received: State, given: Checkpoint, source: Checkpoints, checkpoints: Checkpoints
) -> list[dict[str, Any]]:
    """Links or copies its block files, under names that this run has not; returns their entries in the manifest. What is
    drawn from it stays a random stream of this run."""
    streams = {key: value for key, value in state[name].items() if key.endswith("rng")}
    state[name] = {**received[name], **streams}
    files = []
    for file in given.manifest["blocks"][name]:
        old = Path(str(file["file"])).name
        new = f"{Path(old).stem}-{given.manifest['number']}-{file['sha256'][:12]}.safetensors"
        place = checkpoints.blocks / new
        place.unlink(missing_ok=True)
        try:
            os.link(source.blocks / old, place)
        except OSError:
            shutil.copyfile(source.blocks / old, place)
        files.append({**file, "file": new})
    return files
