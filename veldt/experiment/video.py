"""Videos of greedy episodes, as .gif or .mp4."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from veldt.envs import Envs
from veldt.errors import UserError
from veldt.experiment.run import Run
from veldt.records.tree import Array
from veldt.seeds import derive

SMALLEST = 160  # pixels; smaller frames are enlarged
INSTALL = "pip install 'veldt[video]'"


def check_video(path: Path) -> None:
    if path.suffix not in (".gif", ".mp4"):
        raise UserError(f"A video is a .gif or an .mp4 file, not {path.name!r}.")
    if not path.resolve().parent.is_dir():
        raise UserError(f"The directory of {path} does not exist.")
    if not os.access(path.resolve().parent, os.W_OK):
        raise UserError(f"{path} cannot be written.")


def record_video(run: Run, path: Path, seed: int = 0, max_frames: int = 5_000, epsilon: float | None = None) -> int:
    """Records one greedy episode and returns its number of frames; `epsilon` as in `Run.policy`."""
    check_video(path)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders without a display
    envs, policy = run.config.envs(1, render=True), run.policy(epsilon)
    fps = int(envs.env.metadata.get("render_fps") or 30)
    frames: list[Array] = []
    try:
        record = envs.reset(derive(seed, "evaluation"))
        while len(frames) < max_frames:
            frames.append(_frame(envs))
            if record["last"][0]:
                break
            policy.send(0, record)
            out = policy.recv(0)
            assert out is not None
            record = envs.step(out["action"])
    finally:
        envs.close()
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


def _write(path: Path, frames: list[Array], fps: int) -> None:
    every = 1
    options: dict[str, Any] = {"fps": fps, "macro_block_size": 2}  # the codec needs an even width and height
    if path.suffix == ".gif":
        every = max(1, round(fps / 25))  # few viewers show more than 25 frames per second
        options = {"duration": round(1000 * every / fps), "loop": 0}
    try:
        import imageio

        writer: Any = imageio.get_writer(path, **options)
        with writer:
            for frame in frames[::every]:
                writer.append_data(frame)
    except ImportError:
        raise UserError(f"Videos need imageio, imageio-ffmpeg and Pillow; install them with: {INSTALL}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}).") from None
