"""The weights of another run, with which a new one starts (--init-from)."""

from pathlib import Path

from torch import nn

from veldt.errors import UserError
from veldt.experiment.checkpoint import Checkpoints
from veldt.learning import params
from veldt.records.tree import Tree


def initial_weights(run: str, net: nn.Module) -> tuple[Tree, list[str]]:
    """The last weights of the run that fit the network by name and shape (normalisation statistics are among them), and
    what is to be said of them: a line for each that did not fit."""
    weights = Checkpoints(Path(run) / "checkpoints").weights()
    if weights is None:
        raise UserError(f"{run} has no checkpoint to start from (init_from).")
    ours = params.export(net)
    found = {name: x for name, x in weights.items() if name in ours and x.shape == ours[name].shape}
    if not found:
        raise UserError(f"None of the weights of {run} fits this network by name and shape (init_from).")
    lines = [f"init from {run}: {len(found)} of {len(ours)} arrays, {sum(x.size for x in found.values()):,} numbers"]
    for name, x in ours.items():
        if name not in found:
            there = f"{list(weights[name].shape)} there" if name in weights else "missing there"
            lines.append(f"init: {name} {list(x.shape)} starts at random: it is {there}")
    lines += [f"init: {name} {list(x.shape)} of {run} has no place here" for name, x in weights.items() if name not in ours]
    return found, lines
