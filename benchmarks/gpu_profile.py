"""Where one captured update spends its time on a GPU, kernel by kernel, and what its parts could cost.

    python benchmarks/gpu_profile.py                 all, in about three minutes
    python benchmarks/gpu_profile.py kernels parts   those whose names contain one of these words

`kernels` lists the kernels of one replayed graph of each algorithm. `parts` times single operations of a batch of 512, each
as a graph of its own. `plain` is an update of the Nature CNN without anything that the package adds: what is left to gain.
All times are medians of replays, in microseconds, with TF32 on; the first line says what a run has.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gpu_check as check
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from veldt.algorithms.r2d2 import R2D2
from veldt.algorithms.vtrace import VTraceActorCritic
from veldt.learning.optim import Adam

BATCH, CUDA = 512, torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = {"target_every": 2_500, "publish_every": 10, "anneal": False, "lr": 6.25e-5}


def replayed(work: Callable[[], Any]) -> float:
    """Microseconds of the work as a CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(30):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / 30)
    return sorted(times)[3]


def kernels() -> None:
    for name, algorithm, batch, blocks, fresh, bfloat16 in (
        ("dqn nature 512, bfloat16", check.NATURE, BATCH, 300, 64, True),
        ("dqn nature 512, float32", check.NATURE, BATCH, 300, 64, False),
        ("v-trace 32 x 20", VTraceActorCritic(unroll=20, history=4), 32, 200, 20, False),
        ("r2d2 64 x (40 + 80 + 5), bfloat16", R2D2(history=4), 64, 20, 320, True),
    ):
        store = check.store_of(algorithm, check.PIXELS, blocks, "cuda", fresh, 0.002)
        learner = check.learner_of(store, algorithm, check.PIXELS, batch, bfloat16=bfloat16, **SETTINGS)
        rate, alone, host = check.rate(learner, 1.5), check.bare(learner), check.host_share(learner, 100)
        captured = learner.captured
        assert captured is not None and captured._graph is not None
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            with captured.on_stream():
                for _ in range(10):
                    captured._graph.replay()
            torch.cuda.synchronize()
        rows = sorted(((e.self_device_time_total / 10, e.count / 10, e.key) for e in found.key_averages()), reverse=True)
        rows = [row for row in rows if row[0] > 0]
        busy, count = sum(row[0] for row in rows), sum(row[1] for row in rows)
        print(
            f"{name}: {rate:.0f} updates/s; graph {1e6 / alone:.0f} us of {count:.0f} kernels, {busy:.0f} us; host: {host}"
        )
        for us, calls, key in rows[:24]:
            print(f"    {us:8.1f} us  {calls:6.1f} x  {key[:110]}")
        del learner, store
        torch.cuda.empty_cache()


def parts() -> None:
    images = torch.randint(0, 256, (BATCH, 4, 84, 84), dtype=torch.uint8, device=CUDA)
    for dtype in (BF16, FP32):
        times = [f"{name} {replayed(lambda: fold(images, dtype)):.0f}" for name, fold in FOLDS.items()]  # noqa: B023
        assert all(torch.equal(fold(images, dtype), FOLDS["copy"](images, dtype)) for fold in FOLDS.values())
        print(f"squares of {dtype} pixels become channels: {', '.join(times)}")
        for name, size, out, kernel, stride, height, has_gradient in (
            ("conv1, folded", 64, 32, 2, 1, 21, False),
            ("conv1, plain", 4, 32, 8, 4, 84, False),
            ("conv2", 32, 64, 4, 2, 20, True),
            ("conv3", 64, 64, 3, 1, 9, True),
        ):
            x = torch.randn(BATCH, size, height, height, device=CUDA, dtype=dtype).to(memory_format=torch.channels_last)
            conv = nn.Conv2d(size, out, kernel, stride, device=CUDA, dtype=dtype).to(memory_format=torch.channels_last)
            x.requires_grad_(has_gradient)
            forward_and_backward(f"{name}, {dtype}", conv, x)
        linear = nn.Linear(3136, 1024, device=CUDA, dtype=dtype)
        forward_and_backward(
            f"linear, {dtype}", linear, torch.randn(BATCH, 3136, device=CUDA, dtype=dtype, requires_grad=True)
        )
    weights, gradient = (torch.randn(3_300_000, device=CUDA) for _ in range(2))
    lr, one = torch.tensor(1e-4, device=CUDA), torch.ones((), device=CUDA)
    adam = Adam(weights, gradient, 1e-4)
    passes: dict[str, Callable[[], Any]] = {
        "ours": lambda: adam.masked_step(lr, one),
        "torch's fused": lambda: fused_adam(weights, gradient, averages, lr),
        "norm": lambda: torch.linalg.vector_norm(gradient),
        "nan_to_num_": lambda: gradient.nan_to_num_(0.0, 0.0, 0.0),
        "mul_": lambda: gradient.mul_(1.0),
        "zero_": lambda: gradient.zero_(),
        "to bfloat16": lambda: weights.to(BF16),
    }
    averages = [torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros((), device=CUDA)]
    print(
        "Adam and passes over 3.3 million weights: " + ", ".join(f"{k} {replayed(work):.0f}" for k, work in passes.items())
    )


def forward_and_backward(name: str, layer: nn.Module, x: Tensor) -> None:
    given = [t for t in (x, *layer.parameters()) if t.requires_grad]
    gradient = torch.randn_like(layer(x))
    forward = replayed(lambda: layer(x))
    print(f"{name}: forward {forward:.0f}, both {replayed(lambda: torch.autograd.grad(layer(x), given, gradient)):.0f}")


def fold_by_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `FirstConv.folded` does: transposed and converted in one copy."""
    x = x.view(len(x), 4, 21, 4, 21, 4).permute(0, 2, 4, 1, 3, 5)
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def fold_converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).view(len(x), 4, 21, 4, 21, 4).permute(0, 2, 4, 1, 3, 5).contiguous()


def fold_by_words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Four pixels beside one another stay together, so they are transposed as one word."""
    words = x.view(torch.int32).view(len(x), 4, 21, 4, 21).permute(0, 2, 4, 1, 3).contiguous()
    return words.view(torch.uint8).view(len(x), 21, 21, 4, 4, 4).to(dtype)


FOLDS = {"copy": fold_by_copy, "converted first": fold_converted, "by words": fold_by_words}


def fused_adam(weights: Tensor, gradient: Tensor, averages: list[Tensor], lr: Tensor) -> None:
    mean, square, steps = averages
    settings: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-4, "weight_decay": 0.0}
    torch._fused_adam_(
        *([weights], [gradient], [mean], [square], [], [steps]), lr=lr, amsgrad=False, maximize=False, **settings
    )


class Plain(nn.Module):
    """Nature CNN with two streams, channels last throughout, one product for both hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(
                nn.Conv2d(64, 32, 2),
                nn.ReLU(True),
                nn.Conv2d(32, 64, 4, 2),
                nn.ReLU(True),
                nn.Conv2d(64, 64, 3),
                nn.ReLU(True),
            )
        )
        self.hidden, self.advantage, self.value = nn.Linear(3136, 1024), nn.Linear(512, 6), nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions(x).permute(0, 2, 3, 1).flatten(1)
        x = F.relu(self.hidden(x))
        advantage = self.advantage(x[:, :512])
        q: Tensor = self.value(x[:, 512:]) + advantage - advantage.mean(1, keepdim=True)
        return q


def plain() -> None:
    for dtype, parallel, compiled in ((BF16, False, False), (BF16, True, False), (FP32, False, False), (BF16, False, True)):
        began = time.perf_counter()
        us = replayed(plain_update(dtype, parallel, compiled))
        how = f"{dtype}{', three streams' if parallel else ''}{', torch.compile' if compiled else ''}"
        print(f"plain double DQN update, {how}: {us:.0f} us ({time.perf_counter() - began:.0f} s to make)", flush=True)


def plain_update(dtype: torch.dtype, parallel: bool, compiled: bool) -> Callable[[], Tensor]:
    """Weights in float32; networks of `dtype`, whose weights are copied from them in one piece, and gradients back."""
    windows = torch.randint(0, 256, (BATCH, 7, 84, 84), dtype=torch.uint8, device=CUDA)
    net = Plain().to(CUDA, memory_format=torch.channels_last)
    size = sum(p.numel() for p in net.parameters())
    low, low_gradient, low_target = (torch.zeros(size, device=CUDA, dtype=dtype) for _ in range(3))
    weights = torch.cat(
        [p.detach().permute(0, 2, 3, 1).flatten() if p.ndim == 4 else p.detach().flatten() for p in net.parameters()]
    )
    gradient, target = torch.zeros_like(weights), copy.deepcopy(net).requires_grad_(False)
    low_target.copy_(weights)
    lay(net, low, low_gradient), lay(target, low_target, None)
    online, lagged = (torch.compile(net), torch.compile(target)) if compiled else (net, target)
    reward, discount, importance = (torch.rand(BATCH, device=CUDA) for _ in range(3))
    action, ahead = torch.randint(0, 6, (BATCH,), device=CUDA), torch.randint(1, 4, (BATCH,), device=CUDA)
    first, four = 7 * torch.arange(BATCH, device=CUDA)[:, None], torch.arange(4, device=CUDA)
    averages = [torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros((), device=CUDA)]
    lr, streams = torch.tensor(1e-4, device=CUDA), [torch.cuda.Stream() for _ in range(2)]

    def seen(x: Tensor) -> Tensor:
        return fold_by_words(x.reshape(BATCH, 4, 84, 84), dtype).flatten(3).permute(0, 3, 1, 2)

    def update() -> Tensor:
        here = torch.cuda.current_stream()
        low.copy_(weights)
        s_tm1 = seen(windows[:, :4])
        s_t = seen(windows.flatten(0, 1).index_select(0, (first + ahead[:, None] + four).flatten()))
        one, two = streams if parallel else (here, here)
        with torch.no_grad():
            for stream in {one, two} - {here}:
                stream.wait_stream(here)
            with torch.cuda.stream(one):
                q_t = lagged(s_t)
            with torch.cuda.stream(two):
                best = online(s_t).argmax(1, keepdim=True)
        q_tm1 = online(s_tm1).gather(1, action[:, None]).squeeze(1).float()
        for stream in {one, two} - {here}:
            here.wait_stream(stream)
        with torch.no_grad():
            y = reward + discount * q_t.gather(1, best).squeeze(1).float()
        loss = torch.dot(importance, F.smooth_l1_loss(q_tm1, y, reduction="none")) / BATCH
        low_gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            gradient.copy_(low_gradient)
            gradient.mul_((40 / torch.linalg.vector_norm(gradient)).clamp(max=1))
            fused_adam(weights, gradient, averages, lr)
            return (y - q_tm1).abs()

    return update


def lay(net: nn.Module, vector: Tensor, gradient: Tensor | None) -> None:
    """Makes the parameters views of a vector, and their gradients views of another; convolutions with channels last."""
    at = 0
    for p in net.parameters():
        place, shape = slice(at, at + p.numel()), p.shape
        for x, name in ((vector, "data"), (gradient, "grad")):
            if x is not None and p.ndim == 4:
                setattr(p, name, x[place].view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2))
            elif x is not None:
                setattr(p, name, x[place].view(shape))
        at += p.numel()


def main(words: list[str]) -> None:
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}; TF32 in a run: products {matmul}, convolutions {cudnn}"
    )
    check.tf32(True)
    for part in (kernels, parts, plain):
        if not words or any(word in part.__name__ for word in words):
            part()


if __name__ == "__main__":
    main(sys.argv[1:])
