"""GPUs: the memory that this process and others take, and how busy they are.

Torch says how much memory is taken, in the process that uses the GPU. The name of a GPU and how busy it is are asked of
nvidia-smi, where there is one: every few seconds, without waiting for its answer.
"""

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from typing import Any

EVERY_S = 5.0  # between two questions
TIMEOUT_S = 20.0  # for an answer; after that nvidia-smi is not asked again
QUERY = "--query-gpu=name,utilization.gpu", "--format=csv,noheader,nounits"


def is_gpu(device: str) -> bool:
    return device.startswith("cuda")


def memory_of(kind: str, device: str) -> dict[str, float]:
    """Metrics of a process that uses this device: what torch holds there for a node, and what all processes take of it."""
    if not is_gpu(device):
        return {}
    import torch

    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    return {f"gpu_held/{kind}": float(held), "gpu_memory": float(total - free), "gpu_total": float(total)}


class Gpus:
    """What nvidia-smi says of these devices; nothing where it is missing, and for a run without a GPU."""

    def __init__(self, devices: Iterable[str]) -> None:
        self._places = sorted({int(device.partition(":")[2] or 0) for device in devices if is_gpu(device)})
        self._program = shutil.which("nvidia-smi") if self._places else None
        self._asked = -math.inf  # when the last question was
        self._question: subprocess.Popen[str] | None = None
        self._latest: dict[str, Any] = {}

    def look(self) -> dict[str, Any]:
        """The newest answer: `gpus`, their names, and `gpu_busy`, the largest fraction of the time that one is busy."""
        since = time.monotonic() - self._asked
        if self._question is not None and self._question.poll() is not None:
            text, _ = self._question.communicate()
            self._latest, self._question = read_answer(text, self._places), None
        elif self._question is not None and since > TIMEOUT_S:
            self.close()
            self._latest = {}
        if self._program is not None and self._question is None and since >= EVERY_S:
            self._ask(self._program)
        return self._latest

    def _ask(self, program: str) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        command = [program, *QUERY, *([f"--id={visible}"] if visible else [])]
        self._asked = time.monotonic()
        with contextlib.suppress(OSError):
            self._question = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )

    def close(self) -> None:
        """It is not asked again."""
        self._program = None
        if self._question is not None:
            self._question.kill()
            self._question.communicate()
            self._question = None


def read_answer(text: str, places: Iterable[int]) -> dict[str, Any]:
    """Of the GPUs at these places of nvidia-smi's table; without what it does not know."""
    lines = [[cell.strip() for cell in line.rpartition(",")[::2]] for line in text.splitlines() if "," in line]
    rows = [lines[place] for place in places if place < len(lines)]
    names = [name for name, _ in rows]
    counts = {name: names.count(name) for name in names}
    busy = [float(x) / 100 for _, x in rows if x.replace(".", "", 1).isdigit()]
    out: dict[str, Any] = {"gpu_busy": max(busy)} if busy else {}
    if counts:
        out["gpus"] = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())
    return out
