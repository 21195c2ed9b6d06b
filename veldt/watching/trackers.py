"""Services that collect the metrics of runs: Weights & Biases, MLflow. Imported only if the config asks for them.

A resumed run goes on as the same run of the service: its id is in a file of the run's directory.
"""

import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from veldt.errors import UserError
from veldt.files import replace_text
from veldt.foreign import read_text
from veldt.watching.sinks import Sink, flat_dict, grouped

RETRY_S = 60.0  # between a failure of the service and the next line that is sent
ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def trackers(directory: Path, config: dict[str, Any]) -> list[Sink]:
    """Those that the config (as nested dicts) asks for."""
    log = config["log"]
    return [kind(directory, config) for kind, name in ((Wandb, "wandb"), (MLflow, "mlflow")) if log.get(name)]


class Wandb:
    """The x axis of every metric is env steps; of an evaluation, those of its weights."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError("log.wandb needs Weights & Biases; install it with: pip install 'veldt[wandb]'.") from None
        log, own = config["log"], _read_id(directory / "wandb.id") or secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=log["wandb_project"],
                entity=log["wandb_entity"] or None,
                group=log["wandb_group"] or None,
                tags=list(log["wandb_tags"]) or None,
                name=directory.resolve().name,
                id=own,
                resume="allow",
                dir=str(directory),
                config=config,
            )
        except Exception as error:  # no network, no key, no such project
            raise UserError(
                f"Weights & Biases cannot be reached ({_first_line(error)}); WANDB_MODE=offline keeps metrics here."
            ) from None
        replace_text(directory / "wandb.id", own + "\n")
        self._run.define_metric("*", step_metric="env_steps")
        self._run.define_metric("returns/eval_*", step_metric="eval_env_steps")

    def write(self, line: dict[str, Any]) -> None:
        clocks = {name: line[name] for name in ("env_steps", "time_s", "eval_env_steps") if name in line}
        self._run.log(grouped(line) | clocks)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the run waits for the server
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        try:
            import mlflow
        except ImportError:
            raise UserError("log.mlflow needs MLflow; install it with: pip install 'veldt[mlflow]'.") from None
        self._metric, log = mlflow.entities.Metric, config["log"]
        self._failure, self._retry_at = mlflow.exceptions.MlflowException, 0.0
        try:
            self._client = mlflow.MlflowClient(tracking_uri=log["mlflow_uri"] or None)
            self._id = _read_id(directory / "mlflow.id") or self._create(directory, config)
            self._client.update_run(self._id, status="RUNNING")
        except self._failure as error:
            raise UserError(f"MLflow cannot be used ({_first_line(error)}); check log.mlflow_uri.") from None

    def _create(self, directory: Path, config: dict[str, Any]) -> str:
        name = config["log"]["mlflow_experiment"]
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        own: str = self._client.create_run(experiment, run_name=directory.resolve().name).info.run_id
        for setting, x in flat_dict(config).items():
            self._client.log_param(own, setting, x)
        replace_text(directory / "mlflow.id", own + "\n")
        return own

    def write(self, line: dict[str, Any]) -> None:
        if time.monotonic() < self._retry_at:
            return
        now, evaluated = int(1000 * time.time()), int(line.get("eval_env_steps", line["env_steps"]))
        metrics = [
            self._metric(name, x, now, evaluated if name.startswith("returns/eval_") else int(line["env_steps"]))
            for name, x in grouped(line).items()
        ]
        try:
            self._client.log_batch(self._id, metrics)
        except self._failure as error:
            self._retry_at = time.monotonic() + RETRY_S
            raise OSError(f"MLflow: {_first_line(error)}") from None

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _read_id(path: Path) -> str:
    """Empty: there is none."""
    try:
        found = read_text(path, 100).strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return found if ID.fullmatch(found) else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
