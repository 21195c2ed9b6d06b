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

import numpy as np
import torch

from veldt import callables
from veldt.acting.actor import Evaluation, evaluate
from veldt.acting.trained import TrainedPolicy
from veldt.bounds import above, at_least, between, check_value
from veldt.envs import EnvLike, Envs, make_env
from veldt.errors import UserError
from veldt.experiment import recipes
from veldt.experiment.changes import ON_RESUME
from veldt.experiment.checkpoint import Checkpoints
from veldt.experiment.config import Config
from veldt.experiment.directory import default_directory, load_config, require_trust
from veldt.experiment.listening import Callbacks, CheckpointSaved, EvaluationDone, LogLine
from veldt.experiment.prepare import check_device
from veldt.experiment.session import Session
from veldt.experiment.settings import check, override, refuse_without_effect
from veldt.learning import params
from veldt.machine import find_device
from veldt.records.step import EnvSpec
from veldt.records.tree import Array
from veldt.seeds import derive
from veldt.watching.sinks import Point, evaluations, read_metrics

Which = Literal["latest", "best"]
SMALLEST = 160  # pixels of a video; smaller frames are enlarged


class Run:
    """A run directory. `trust`: its config may name code (env, algorithm.network_from), which is imported and called."""

    def __init__(self, path: str | Path, trust: bool = False) -> None:
        self.path, self.trust = Path(path), trust

    @property
    def config(self) -> Config:
        if not (self.path / "config.yaml").exists():
            raise UserError(f"{self.path} is not a run directory: it has no config.yaml.")
        return load_config(self.path / "config.yaml", self.trust)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def evaluations(self) -> list[Point]:
        """The learning curve: the evaluations during training."""
        return evaluations(self.metrics)

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints", self.config.checkpoint.keep, self.config.checkpoint.store)

    def policy(self, epsilon: float | None = None, which: Which = "latest", device: str = "cpu") -> TrainedPolicy:
        """The policy of the last weights, or of those with the best evaluation. Its fraction of random actions is
        eval.epsilon, unless another is given."""
        config, checkpoints = self._code_config(), self.checkpoints()
        if which not in get_args(Which):
            raise UserError(f"which is latest or best, not {which!r}.")
        weights = checkpoints.weights() if which == "latest" else checkpoints.best_weights()
        if weights is None:
            what = (
                "no checkpoint yet; train it first" if which == "latest" else "no best checkpoint: it was not evaluated yet"
            )
            raise UserError(f"{self.path} has {what}.")
        explore = config.actor.explore(0, 1, 1)  # of an actor with one environment
        trained = float(explore(config.steps) if callable(explore) else explore[0])
        epsilon = config.eval.epsilon if epsilon is None else epsilon
        policy = TrainedPolicy(config.algorithm, config.env_spec(), device, epsilon, trained)
        params.restore(policy.net, weights)
        return policy

    def evaluate(
        self,
        episodes: int = 20,
        seed: int = 0,
        epsilon: float | None = None,
        env: str = "",
        which: Which = "latest",
    ) -> Evaluation:
        """Greedy episodes of the last weights; `epsilon` and `which` as in `policy`. `env` may be another environment.

        `bad_episodes` counts those with observations or rewards that were not finite.
        """
        check_value("episodes", episodes, above(0))
        check_value("seed", seed, at_least(0))
        if epsilon is not None:
            check_value("epsilon", epsilon, between(0, 1))
        config = self._code_config()
        clip, n = config.clip_observations, min(episodes, 20)
        with closing(make_env(env or config.env, n, protocol=config.protocol, clip=clip)) as envs:
            theirs, own = envs.spec, config.env_spec() if env else envs.spec
            if own.observation != theirs.observation or own.action_space != theirs.action_space:
                raise UserError(
                    f"The observations or actions of {theirs.name} differ from those of {own.name}, the run's environment."
                )
            found = evaluate(
                envs, self.policy(epsilon, which), episodes, derive(seed, "evaluation"), config.eval.max_length
            )
        assert found is not None
        return found

    def _code_config(self) -> Config:
        """The config, if the code that it names may be used."""
        config = self.config
        require_trust(self.path, config, self.trust, given=("gate.listen", "log.wandb"))  # which only training does
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
    network: Callable[[EnvSpec], torch.nn.Module] | None = None,
    quiet: bool = False,
    on_log: Callable[[LogLine], bool | None] | None = None,
    on_evaluation: Callable[[EvaluationDone], bool | None] | None = None,
    on_checkpoint: Callable[[CheckpointSaved], bool | None] | None = None,
    **overrides: Any,
) -> Run:
    """Trains until `steps` env steps are done, and returns the run. Continues from a checkpoint in the directory.

    `recipe` is a name, module:function, a function from an environment to a Config, or a Config.
    `network` makes the part below the heads from an EnvSpec: [B, ...] -> [B, features].
    Overrides are settings of the config by (dotted) name: steps=60_000, seed=1, **{"learner.lr": 5e-4}. A callback that
    returns False or raises `veldt.Stop` ends the run, as if its steps were done.
    """
    if env is not None and not isinstance(env, str) and not callable(env):
        raise UserError(
            f"env must be a name or a function that makes an environment, not a {type(env).__name__}; for example "
            "env=lambda: gym.make('CartPole-v1')."
        )
    if network is not None:
        overrides["algorithm.network_from"] = callables.name_of(network)
    name = callables.name_of(env) if callable(env) else env
    recipe = callables.name_of(recipe) if callable(recipe) else recipe
    base = recipe if isinstance(recipe, Config) else recipes.make(recipe, name or "CartPole-v1")
    if network is not None and not hasattr(base.algorithm, "network_from"):
        raise UserError(f"{base.recipe} takes no network of your own: its algorithm has no network_from.")
    config = override(base, overrides | ({"env": name} if name else {}))
    if config.demos:  # absolute: the run may be resumed from another directory
        config = dataclasses.replace(config, demos=str(Path(config.demos).resolve()))
    if config.init_from:
        config = dataclasses.replace(config, init_from=str(Path(config.init_from).resolve()))
    check(config)
    refuse_without_effect(config, base)
    path = Path(run) if run else default_directory(config)
    Session(config, path, quiet, Callbacks(on_log, on_evaluation, on_checkpoint)).run()
    return Run(path, trust=True)  # the caller named what it imports


def load(run: str | Path, which: Which = "latest", device: str = "cpu", trust: bool = False) -> TrainedPolicy:
    """The policy that a run learned: greedy, unless a call says how much to explore. `trust` as in `Run`."""
    check_device(device)
    return Run(run, trust).policy(0.0, which, find_device(device))


def resume(
    run: str | Path,
    quiet: bool = False,
    trust: bool = False,
    on_log: Callable[[LogLine], bool | None] | None = None,
    on_evaluation: Callable[[EvaluationDone], bool | None] | None = None,
    on_checkpoint: Callable[[CheckpointSaved], bool | None] | None = None,
    **overrides: Any,
) -> Run:
    """Goes on with a run from its last checkpoint. `trust`: do all that its config asks for (`directory.asks`).

    Overrides are settings that may change (`changes.ON_RESUME`); callbacks as in `train`.
    """
    done = Run(run, trust)
    config = override(done.config, overrides)
    require_trust(done.path, config, trust, given=overrides)
    check(config)
    refuse_without_effect(config, done.config)
    callbacks = Callbacks(on_log, on_evaluation, on_checkpoint)
    Session(config, done.path, quiet, callbacks, ON_RESUME).run()
    return done


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
    which: Which = "latest",
) -> int:
    """Records one greedy episode and returns its number of frames; `epsilon` and `which` as in `Run.policy`."""
    check_video(path)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders without a display
    policy = run.policy(epsilon, which)
    frames: list[Array] = []
    with closing(run.config.envs(1, render=True)) as envs:
        fps = int(envs.env.metadata.get("render_fps") or 30)
        record = envs.reset(derive(seed, "evaluation"))
        while len(frames) < max_frames:
            frames.append(_frame(envs))
            if record["last"][0]:
                break
            policy.send(0, record)
            out = policy.recv(0)
            assert out is not None
            record = envs.step(out["action"])
    _write(path, frames, fps)
    return len(frames)


def _frame(envs: Envs) -> Array:
    try:
        rendered = envs.env.render()
    except NotImplementedError:
        rendered = None
    frame = rendered[0] if isinstance(rendered, list | tuple) and rendered else rendered
    if not isinstance(frame, np.ndarray):
        raise UserError(f"{envs.name} cannot be rendered: it has no render_mode rgb_array.")
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
