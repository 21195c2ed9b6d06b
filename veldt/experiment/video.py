"""Videos of greedy episodes, as .gif or .mp4."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from veldt.envs import Envs
from veldt.errors import UserError
from veldt.experiment.run import Run
from veldt.records.tree import Array
from veldt.seeds import derive

SMALLEST = 160  # pixels; smaller pictures are enlarged
INSTALL = "pip install 'veldt[video]'"


def check_video(path: Path) -> None:
    if path.suffix not in (".gif", ".mp4"):
        raise UserError(f"A video is a .gif or an .mp4 file, not {path.name!r}.")
    if not path.resolve().parent.is_dir():
        raise UserError(f"The directory of {path} does not exist.")
    if not os.access(path.resolve().parent, os.W_OK):
        raise UserError(f"{path} cannot be written.")


def record_video(run: Run, path: Path, seed: int = 0, max_frames: int = 5_000, epsilon: float | None = None) -> int:
    """Records one greedy episode and returns how many frames it has; `epsilon` as in `Run.policy`."""
    check_video(path)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws to memory, whether or not there is a display
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
    try:
        _gif(path, frames, fps) if path.suffix == ".gif" else _mp4(path, frames, fps)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error}).") from None
    return len(frames)


def _frame(envs: Envs) -> Array:
    try:
        rendered = envs.env.render()
    except NotImplementedError:
        rendered = None
    frame = rendered[0] if isinstance(rendered, list | tuple) and rendered else rendered
    if not isinstance(frame, np.ndarray):
        raise UserError(f"{envs.name} cannot be rendered: it has no render_mode rgb_array.")
    if frame.dtype != np.uint8:  # MinAtar paints with numbers from 0 to 1
        frame = (frame * (255 if frame.max() <= 1 else 1)).clip(0, 255).round().astype(np.uint8)
    larger = max(1, SMALLEST // min(frame.shape[:2]))
    return frame.repeat(larger, 0).repeat(larger, 1)


def _gif(path: Path, frames: list[Array], fps: int) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise UserError(f"Videos need Pillow; install it with: {INSTALL}.") from None
    every = max(1, round(fps / 25))  # few viewers show more than 25 frames a second
    images = [Image.fromarray(frame).quantize(32) for frame in frames[::every]]
    images[0].save(path, save_all=True, append_images=images[1:], duration=round(1000 * every / fps), loop=0)


def _mp4(path: Path, frames: list[Array], fps: int) -> None:
    try:
        import imageio_ffmpeg
    except ImportError:
        raise UserError(f"mp4 videos need imageio-ffmpeg; install it with: {INSTALL}.") from None
    height, width = frames[0].shape[:2]
    writer = imageio_ffmpeg.write_frames(str(path), (width, height), fps=fps, macro_block_size=2)
    writer.send(None)
    for frame in frames:
        writer.send(np.ascontiguousarray(frame))
    writer.close()
