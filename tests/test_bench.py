"""The bare loops that runs are compared with: each prints its rate as JSON."""

import json
from collections.abc import Callable

import pytest

from veldt.bench import apex, impala


@pytest.mark.parametrize("loop", [apex.bare_actor, apex.bare_learner, impala.bare_actor, impala.bare_learner])
def test_a_bare_loop_prints_its_rate(loop: Callable[[int, float], None], capsys: pytest.CaptureFixture[str]) -> None:
    loop(2, 0.02)
    assert json.loads(capsys.readouterr().out) > 0
