"""The manifest of a checkpoint, read and checked in one place: whoever sends a run directory can write anything in it.

Its first line is JSON, its second the sha256 of that. A wrong type or an impossible number is Corrupt, by the field's name.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from veldt.files import MANIFEST, Corrupt
from veldt.foreign import LARGE, plain, read_text
from veldt.records.tree import Tree

FORMAT = 2
MOST = 2**62  # of any count
WEIGHTS, STATE = "weights.safetensors", "state.safetensors"
FINGERPRINT = {"sha256": str, "bytes": int}
BLOCKS = {"file": str, "first": int, "stop": int, **FINGERPRINT}
HAS: dict[str, Any] = {"number": int, "nodes": dict, "weights": dict, "blocks": dict, "files": dict}
CLOCKS = {"time_s": int | float, "env_steps": int}


def read_manifest(path: Path) -> dict[str, Any]:
    """Of the checkpoint in this directory."""
    try:
        body, digest, end = read_text(path / MANIFEST, LARGE).split("\n")
    except (OSError, ValueError) as error:
        raise Corrupt(f"its manifest cannot be read ({error})") from None
    if end or hashlib.sha256(body.encode()).hexdigest() != digest:
        raise Corrupt("its manifest was changed")
    try:
        manifest = plain(json.loads(body))
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        raise Corrupt("its manifest is not a JSON object")
    if manifest.get("format") == 1 and "learner" in manifest:  # it had one network
        manifest |= {"format": FORMAT, "weights": {str(manifest["learner"]): WEIGHTS}}
    if manifest.get("format") != FORMAT:
        raise Corrupt(f"it has format {str(manifest.get('format'))[:20]}, this Veldt reads format {FORMAT}")
    _check(manifest)
    return manifest


def _check(manifest: dict[str, Any]) -> None:
    _has("", manifest, HAS)
    _has("", manifest, {name: kind for name, kind in CLOCKS.items() if name in manifest})
    for node, state in manifest["nodes"].items():
        _is(f"nodes.{node}", state, dict)
    for node, name in manifest["weights"].items():
        _is(f"weights.{node}", name, str)
    for name, file in manifest["files"].items():
        _has(f"files.{name}", file, FINGERPRINT)
    for store, files in manifest["blocks"].items():
        _is(f"blocks.{store}", files, list)
        for i, file in enumerate(files):
            _has(f"blocks.{store}[{i}]", file, BLOCKS)
            if file["first"] >= file["stop"]:
                raise Corrupt(f"its manifest has an invalid blocks.{store}[{i}]: it ends before it begins")
    files = manifest["files"]
    if any(Path(name).name != name for name in files) or not {STATE, *manifest["weights"].values()} <= files.keys():
        raise Corrupt("its manifest names files that are not its own")


def _has(where: str, value: Any, kinds: dict[str, Any]) -> None:
    _is(where, value, dict)
    for name, kind in kinds.items():
        _is(f"{where}.{name}".lstrip("."), value.get(name), kind)


def _is(where: str, value: Any, kind: Any) -> None:
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if fits and isinstance(value, int | float):
        fits = 0 <= value <= MOST and math.isfinite(value)
    if not fits:
        raise Corrupt(f"its manifest has an invalid {where[:100]}")


def check_best(manifest: dict[str, Any]) -> None:
    """Raises Corrupt unless the manifest says which evaluation its weights are the best of."""
    _is("env_steps", manifest.get("env_steps"), int)
    _is("mean_return", abs(found) if isinstance(found := manifest.get("mean_return"), int | float) else None, int | float)


def check_store(name: str, state: dict[str, Any]) -> None:
    """Raises Corrupt unless a store of this state could have existed: its blocks are next to one another in its slots."""
    counts, items = state.get("counts"), state.get("items")
    slots = getattr(items, "shape", (0,))[0]
    _has(f"nodes.{name}.counts", counts, {"oldest": int, "next": int})
    assert isinstance(counts, dict)
    if not counts["oldest"] <= counts["next"] <= counts["oldest"] + slots:
        raise Corrupt(f"its manifest has an invalid nodes.{name}.counts.next: there are {slots:,} slots")


def check_like(where: str, value: Any, ours: Any) -> None:
    """Raises Corrupt unless a value of a node's state has the type of the one that the node has now, all through."""
    if isinstance(ours, np.ndarray):
        fits = isinstance(value, np.ndarray) and (value.dtype, value.ndim) == (ours.dtype, ours.ndim)
    elif isinstance(ours, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = ours is None or type(value) is type(ours)
    if not fits:
        raise Corrupt(f"its state has an invalid {where[:100]}")
    if isinstance(ours, dict):
        for name in ours.keys() & value.keys():
            check_like(f"{where}.{name}", value[name], ours[name])


def check_finite(file: str, weights: Tree) -> None:
    for name, x in weights.items():
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise Corrupt(f"{file} has weights that are not finite ({name})")
