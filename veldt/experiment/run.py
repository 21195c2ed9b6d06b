"""A run: training it, resuming it, evaluating what it learned, and a video (.gif or .mp4) of that.

Its directory holds config.yaml, metrics.jsonl, TensorBoard events, log.txt and checkpoints/. Training in a directory that
has a checkpoint continues from it.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
import torch

from veldt import callables
from veldt.acting.actor import Evaluation, ask, evaluate
from veldt.acting.trained import TrainedPolicy
from veldt.bounds import above, at_least, between, check_value
from veldt.env_kwargs import as_names
from veldt.envs import EnvLike, Envs, make_env
from veldt.errors import UserError
from veldt.experiment import recipes, saved_spec
from veldt.experiment.changes import ON_RESUME
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.config import Config
from veldt.experiment.directory import config_of, default_directory, load_config, require_trust
from veldt.experiment.env_names import name_of, with_env
from veldt.experiment.listening import Callbacks, CheckpointSaved, EvaluationDone, LogLine
from veldt.experiment.prepare import check_device
from veldt.experiment.session import Session
from veldt.experiment.settings import check, override, refuse_without_effect
from veldt.learning import params
from veldt.machine import find_device
from veldt.records.step import EnvSpec
from veldt.records.tree import Array
from veldt.seeds import derive
from veldt.watching.sinks import EVALUATION, Point, evaluations, read_metrics

SMALLEST = 320  # pixels of a video; smaller frames are enlarged
FPS = 10  # of environments that do not say: a game on a grid can be followed at this speed


Network = Callable[[EnvSpec], torch.nn.Module]
Which = Literal["latest", "best"]


class Run:
    """A run directory. `trust`: its config may name code (env, algorithm.network_from), which is imported and called.

    `network` is the function that made the network, where the config's name for it is unknown: after a notebook restarted.
    """

    def __init__(self, path: str | Path, trust: bool = False, network: Network | None = None) -> None:
        self.path, self.trust, self.network = Path(path), trust, network

    def __repr__(self) -> str:
        try:
            config, lines = self.config, self.metrics
        except UserError:
            return f"Run({str(self.path)!r}, without metrics)"
        steps, points = lines[-1]["env_steps"] if lines else 0, evaluations(lines)
        text = f"{config.recipe} on {config.env}, {steps:,} of {config.steps:,} env steps"
        returned = f", greedy return {points[-1].mean_return:.1f}" if points else ""
        return f"Run({str(self.path)!r}, {text}{returned})"

    @property
    def config(self) -> Config:
        return load_config(config_of(self.path), self.trust)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def evaluations(self) -> list[Point]:
        """The learning curve: the evaluations during training."""
        return evaluations(read_metrics(self.path / "metrics.jsonl", EVALUATION, having="eval_return"))

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", self.config.checkpoint.keep, self.config.checkpoint.store)

    def policy(
        self,
        epsilon: float | None = None,
        env: EnvLike | EnvSpec | None = None,
        which: Which = "latest",
        device: str = "cpu",
    ) -> TrainedPolicy:
        """The policy of the last weights, or of those with the best evaluation. Its fraction of random actions is
        eval.epsilon, unless another is given.

        It needs no environment; an `env` that is given is compared with the one that the run was trained on.
        """
        saved, other = saved_spec.read(self.path), env if isinstance(env, EnvSpec) else None
        if env and not isinstance(env, EnvSpec):
            other = self._code_config(env).env_spec()
        config, checkpoints = self._code_config(needs_env=saved is None and other is None), self.checkpoints()
        if which not in get_args(Which):
            raise UserError(f"which is latest or best, not {which!r}.")
        weights = checkpoints.weights() if which == "latest" else checkpoints.best_weights()
        if weights is None:
            wanted = "checkpoint yet; train it first" if which == "latest" else "best checkpoint: it was not evaluated yet"
            raise UserError(f"{self.path} has no {wanted}.")
        spec = saved or other or config.env_spec()
        saved_spec.check_fits(spec, other or spec, self.path)
        explore = config.actor.explore(0, 1, 1)  # of an actor with one environment
        trained = float(explore(config.steps) if callable(explore) else explore[0])
        epsilon = config.eval.epsilon if epsilon is None else epsilon
        policy = TrainedPolicy(config.algorithm, spec, device, epsilon, trained, clip=config.clip_observations)
        params.restore(policy.net, weights)
        return policy

    def evaluate(
        self,
        episodes: int = 20,
        seed: int = 0,
        epsilon: float | None = None,
        env: EnvLike | None = None,
        which: Which = "latest",
    ) -> Evaluation:
        """Greedy episodes of the last weights; `epsilon` and `which` as in `policy`. `env` is another environment of the
        same kind, or the run's own where its name is unknown: after a notebook restarted.

        `bad_episodes` counts those with observations or rewards that were not finite.
        """
        check_value("episodes", episodes, above(0))
        check_value("seed", seed, at_least(0))
        if epsilon is not None:
            check_value("epsilon", epsilon, between(0, 1))
        longest = self.config.eval.max_length
        with closing(self.envs(min(episodes, 20), env=env)) as envs:
            found = evaluate(envs, self.policy(epsilon, envs.spec, which), episodes, derive(seed, "evaluation"), longest)
        assert found is not None
        return found

    def envs(self, n: int = 1, render: bool = False, env: EnvLike | None = None, **options: Any) -> Envs:
        """The run's environments, or others of the same kind. `options` are those of `make_env`, in place of the run's."""
        config, own, saved = self._code_config(env), self.config, saved_spec.read(self.path)
        if saved is not None and not saved.mask:  # of a run from before there were any, too
            options = {"action_masks": False} | options
        try:
            return make_env(config.env, n, render, **own.options_for(config.env) | options)
        except UserError as error:
            if not env and ":" not in config.env and config.env not in gym.registry:
                error.add_note(f"{self.path} was trained on it: if a script registered it, give --env script.py:Class")
            raise

    def _code_config(self, env: EnvLike | None = None, needs_env: bool = True) -> Config:
        """The config, with what was given in place of what it names, if the code that it names may be used."""
        # Only training listens and sends metrics.
        config, given = with_env(self.config, env), ["gate.listen", "log.wandb", "log.mlflow"]
        if env or not needs_env:
            given.append("env")
        if self.network is not None:
            config = override(config, {"algorithm.network_from": callables.name_of(self.network)})
            given.append("algorithm.network_from")
        require_trust(self.path, config, self.trust, given)
        return config

    def weights_hash(self) -> str:
        """sha256 of the last weights, by name and value."""
        weights = self.checkpoints().weights()
        assert weights is not None, self.path
        digest = hashlib.sha256()
        for name, array in sorted(weights.items()):
            digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()


def train(
    recipe: str | Config | Callable[[str], Config],
    env: EnvLike | None = None,
    run: str | Path | None = None,
    network: Network | None = None,
    quiet: bool = False,
    on_log: Callable[[LogLine], bool | None] | None = None,
    on_evaluation: Callable[[EvaluationDone], bool | None] | None = None,
    on_checkpoint: Callable[[CheckpointSaved], bool | None] | None = None,
    until: int | None = None,
    **overrides: Any,
) -> Run:
    """Trains until `steps` env steps are done, and returns the run. Continues from a checkpoint in the directory.

    `recipe` is a name, module:function, a function from an environment to a Config, or a Config.
    `network` makes the part below the heads from an EnvSpec: [B, ...] -> [B, features].
    Overrides are settings of the config by (dotted) name: steps=60_000, seed=1, **{"learner.lr": 5e-4}. `env_kwargs` may be
    a dict, and `wrappers` classes or functions. A callback that returns False or raises `veldt.Stop` ends the run, as if
    its steps were done. `until`: it pauses at this number of env steps; `resume` goes on. Schedules still take `steps`.
    """
    callables.starts_run()
    check_until(until)
    overrides = as_names(overrides)
    if network is not None:
        overrides["algorithm.network_from"] = callables.name_of(network)
    recipe = callables.name_of(recipe) if callable(recipe) else recipe
    usual = recipe.env if isinstance(recipe, Config) else "CartPole-v1"
    name = name_of(usual if env is None else env)
    base = recipe if isinstance(recipe, Config) else recipes.make(recipe, name)
    if network is not None and not hasattr(base.algorithm, "network_from"):
        raise UserError(f"{base.recipe} takes no network of your own: its algorithm has no network_from.")
    config = override(base, overrides | {"env": name})
    if config.demos:  # absolute: the run may be resumed from another directory
        config = dataclasses.replace(config, demos=str(Path(config.demos).resolve()))
    if config.init_from:
        config = dataclasses.replace(config, init_from=str(Path(config.init_from).resolve()))
    check(config)
    refuse_without_effect(config, base)
    path = Path(run) if run else default_directory(config)
    Session(config, path, quiet, Callbacks(on_log, on_evaluation, on_checkpoint), until=until).run()
    return Run(path, trust=True)  # the caller named what it imports


def load(
    run: str | Path,
    which: Which = "latest",
    device: str = "cpu",
    trust: bool = False,
    env: EnvLike | None = None,
    network: Network | None = None,
) -> TrainedPolicy:
    """The policy that a run learned: greedy, unless a call says how much to explore. `trust` and `network` as in `Run`; an
    `env` that is given is compared with the run's."""
    check_device(device)
    return Run(run, trust, network).policy(0.0, env, which, find_device(device))


def resume(
    run: str | Path,
    quiet: bool = False,
    trust: bool = False,
    env: EnvLike | None = None,
    network: Network | None = None,
    on_log: Callable[[LogLine], bool | None] | None = None,
    on_evaluation: Callable[[EvaluationDone], bool | None] | None = None,
    on_checkpoint: Callable[[CheckpointSaved], bool | None] | None = None,
    until: int | None = None,
    **overrides: Any,
) -> Run:
    """Goes on with a run from its last checkpoint. `trust`: do all that its config asks for (`directory.asks`).

    Overrides are settings that may change (`changes.ON_RESUME`); callbacks as in `train`. `env` is another environment of
    the same kind, or the run's own where its name is unknown: after a notebook restarted. So is `network`. `until` as
    in `train`.
    """
    callables.starts_run()
    check_until(until)
    done = Run(run, trust, network)
    given: dict[str, Any] = {"env": name_of(env)} if env else {}
    if network is not None:
        given["algorithm.network_from"] = callables.name_of(network)
    config = override(done.config, overrides | given)
    require_trust(done.path, config, trust, given=overrides | given)
    check(config)
    refuse_without_effect(config, done.config)
    callbacks = Callbacks(on_log, on_evaluation, on_checkpoint)
    Session(config, done.path, quiet, callbacks, {*ON_RESUME, *given}, until).run()
    return done


def check_until(until: int | None) -> None:
    if until is not None:
        check_value("until", until, above(0))


def check_video(path: Path) -> None:
    if path.suffix not in (".gif", ".mp4"):
        raise UserError(f"A video is a .gif or an .mp4 file, not {path.name!r}.")
    if not path.resolve().parent.is_dir():
        raise UserError(f"The directory of {path} does not exist.")
    if not os.access(path.resolve().parent, os.W_OK):
        raise UserError(f"{path} cannot be written.")


def record_video(
    run: Run,
    path: Path,
    seed: int = 0,
    max_frames: int = 5_000,
    epsilon: float | None = None,
    env: EnvLike | None = None,
    which: Which = "latest",
) -> int:
    """Records one greedy episode and returns its number of frames; the last three as in `Run.evaluate`."""
    check_video(path)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders without a display
    frames: list[Array] = []
    with closing(run.envs(1, render=True, env=env)) as envs:
        policy = run.policy(epsilon, envs.spec, which)
        fps = int(envs.env.metadata.get("render_fps") or FPS)
        record = envs.reset(derive(seed, "evaluation"))
        while len(frames) < max_frames:
            frames.append(_frame(envs))
            if record["last"][0]:
                break
            record = envs.step(ask(policy, record)["action"])
    _write(path, frames, fps)
    return len(frames)


def _frame(envs: Envs) -> Array:
    try:
        rendered = envs.env.render()
    except NotImplementedError:
        rendered = None
    except gym.error.DependencyNotInstalled as error:
        why = str(error).partition(",")[0]
        advice = "install what it needs; for many environments that is: pip install 'veldt[video]'"
        raise UserError(f"{envs.name} cannot be rendered ({why}): {advice}.") from None
    frame = rendered[0] if isinstance(rendered, list | tuple) and rendered else rendered
    if not isinstance(frame, np.ndarray):
        raise UserError(
            f"{envs.name} cannot be rendered: it has no render_mode rgb_array. Give its class an argument render_mode and "
            "a render() that returns an image [height, width, 3]; a function that makes it has to set that mode itself."
        )
    if frame.dtype != np.uint8:  # MinAtar renders floats from 0 to 1
        frame = (frame * (255 if frame.max() <= 1 else 1)).clip(0, 255).round().astype(np.uint8)
    larger = max(1, SMALLEST // min(frame.shape[:2]))
    return frame.repeat(larger, 0).repeat(larger, 1)


def _write(path: Path, frames: list[Any], fps: int) -> None:
    every = 1
    options: dict[str, Any] = {"fps": fps, "macro_block_size": 2}  # the codec needs an even width and height
    if path.suffix == ".gif":
        every = max(1, round(fps / 25))  # few viewers show more than 25 frames per second
        options = {"duration": round(1000 * every / fps), "loop": 0}
    try:
        import imageio

        imageio.mimwrite(path, frames[::every], **options)
    except ImportError:
        raise UserError(
            "Videos need imageio, imageio-ffmpeg and Pillow; install them with: pip install 'veldt[video]'."
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}).") from None
