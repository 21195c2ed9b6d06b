"""A quantum: a member's run from where it is to a number of env steps, and what its weights are worth then."""

import contextlib
import logging
import time
from pathlib import Path

from veldt.errors import Diverged, EnvError, ProcessFailed, UserError
from veldt.experiment.changes import ON_RESUME
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.directory import load_config
from veldt.experiment.ending import evaluate_weights
from veldt.experiment.populations.population import Outcome
from veldt.experiment.session import Session
from veldt.runtime.base import Stuck

log = logging.getLogger("veldt")
FAILURES = (UserError, Diverged, EnvError, ProcessFailed, Stuck)  # of a run, as opposed to bugs


def run_quantum(config_file: Path, run: Path, until: int) -> Outcome:
    """Done again after a kill at any moment, it gives the same result: fitness follows from the weights alone."""
    began, session = time.monotonic(), None
    try:
        config = load_config(config_file, trust=True)  # whoever started the population was asked
        session = Session(config, run, quiet=True, may_change=ON_RESUME, until=until)
        session.run()
        failed = f"it ended before {until:,} env steps: {session.stopped_by}" if session.stopped_by else ""
    except FAILURES as error:
        failed = str(error) or type(error).__name__
    checkpoint = None
    with contextlib.suppress(UserError):
        checkpoint = Checkpoints(run / "checkpoints").load(blocks=False)
    if checkpoint is None:
        return Outcome(seconds=time.monotonic() - began, failed=failed or "it has no checkpoint")
    found = None
    if not failed and session is not None:
        found = session.last or evaluate_weights(config, config.env_spec(), checkpoint.weights())
        failed = "" if found is not None else "its weights could not be evaluated"
    return Outcome(
        returns=() if found is None else tuple(found.returns),
        env_steps=int(checkpoint.manifest["env_steps"]),
        learner_steps=int(checkpoint.manifest["learner_steps"]),
        checkpoint=checkpoint.number,
        seconds=time.monotonic() - began,
        train_seconds=0.0 if session is None else session.trained_s,
        failed=failed,
    )
