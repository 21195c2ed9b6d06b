"""Bounds that fields declare, and the one place that checks them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from veldt import bounds
from veldt.bounds import above, at_least, between
from veldt.errors import UserError


@dataclass(frozen=True)
class Part:
    lr: Annotated[float, above(0)] = 0.1
    sizes: Annotated[tuple[int, ...], above(0)] = (8, 8)
    patience: Annotated[float, above(0, infinite=True)] = 1.0


@dataclass(frozen=True)
class Whole:
    name: str = "any"
    queue: Annotated[int, at_least(2)] = 2
    seed: Annotated[int, at_least(0)] = 0
    ratio: Annotated[float, between(0, 1)] = 0.5
    part: Part = field(default_factory=Part)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Whole(queue=1), "queue must be at least 2, not 1."),
        (Whole(seed=-1), "seed must not be negative, but it is -1."),
        (Whole(ratio=1.5), "ratio must be from 0 to 1, not 1.5."),
        (Whole(ratio=-0.1), "ratio must be from 0 to 1, not -0.1."),
        (Whole(ratio=math.nan), "ratio must be from 0 to 1, not nan."),
        (Whole(part=Part(lr=0)), "part.lr must be greater than 0, not 0."),
        (Whole(part=Part(lr=math.nan)), "part.lr must be greater than 0, not nan."),
        (Whole(part=Part(lr=math.inf)), "part.lr must be finite, not inf."),
        (Whole(part=Part(sizes=(4, 0))), "part.sizes must be greater than 0, not 0."),
        (Whole(part=Part(patience=0.0)), "part.patience must be greater than 0, not 0.0."),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_number_out_of_its_bound_is_named(config: Whole, says: str) -> None:
    with pytest.raises(UserError) as caught:
        bounds.check(config)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "config", [Whole(), Whole(ratio=0.0), Whole(ratio=1.0), Whole(part=Part(sizes=(), patience=math.inf))], ids=repr
)
def test_the_ends_of_a_range_are_allowed(config: Whole) -> None:
    bounds.check(config)


def test_torch_is_not_imported() -> None:
    import subprocess
    import sys

    code = "import sys, veldt.bounds; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
