"""The reference batch of virtual batch normalisation: observations of a random policy, which follow from a seed."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch

from veldt.algorithms.base import Observer
from veldt.envs import Envs
from veldt.nets.torsos import each
from veldt.records.history import History
from veldt.records.step import EnvSpec
from veldt.seeds import derive

BETWEEN = 10  # steps between two observations of the batch


def reference_batch(algorithm: Observer, env: EnvSpec, envs: Callable[[int], Envs], n: int, seed: int) -> Any:
    """n observations as the network sees them, [n, ...] or a dict of such, one of every tenth step in one environment."""
    space, history = env.action_space, History(env, algorithm.window.history, 1)
    space.seed(derive(seed, "random actions") % 2**31)
    found: list[Any] = []
    with closing(envs(1)) as one, torch.no_grad():
        record = one.reset(derive(seed, "reference"))
        for step in range(BETWEEN * n):
            rows = {name: torch.from_numpy(x) for name, x in history.append(record).items()}
            if step % BETWEEN == BETWEEN - 1:
                found.append(each(algorithm.observe(rows, algorithm.history - 1), torch.Tensor.clone))
            action = np.asarray(space.sample(), env.action.dtype)[None]
            record = one.step(action)
    if isinstance(found[0], dict):
        return {key: torch.cat([x[key] for x in found]) for key in found[0]}
    return torch.cat(found)
