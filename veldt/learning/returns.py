"""Returns: pure functions of columns `[..., T]`, in NumPy or torch."""

from typing import Any, NamedTuple

import numpy as np

from veldt.compiled import njit
from veldt.records.tree import Array, namespace


class NStep(NamedTuple):
    """For each step t: reward_t = sum of m discounted rewards, to be bootstrapped with discount_t * value[t + m]."""

    reward: Any  # [..., T - n]
    discount: Any  # [..., T - n], 0 where the episode terminated within m steps
    m: Any  # [..., T - n], n, or the steps to the episode's last record if they are fewer


def n_step(reward: Any, discount: Any, last: Any, n: int, gamma: float) -> NStep:
    """G_t = sum_{k=1..m} gamma^(k-1) r_{t+k} + gamma^m v_{t+m}, m = min(n, steps until `last`).

    All inputs are [..., T] with the record's alignment: reward[t] and discount[t] belong to ARRIVING at t. A discount of
    0 stops the sum and the bootstrap; `last` with discount 1 (truncation) stops the sum and keeps the bootstrap.
    """
    size = reward.shape[-1] - n
    assert n >= 1 and size >= 1, (reward.shape, n)
    if namespace(reward) is np:
        rows = [x.reshape(-1, x.shape[-1]) for x in (reward.astype(np.float32, copy=False), discount, last)]
        out = _n_step(rows[0], rows[1], rows[2], n, gamma)
        return NStep(*(x.reshape(*reward.shape[:-1], size) for x in out))
    where = namespace(reward).where
    total, product, alive = reward[..., 1 : 1 + size], gamma * discount[..., 1 : 1 + size], ~last[..., 1 : 1 + size]
    m = 1 + 0 * alive
    for k in range(2, n + 1):
        row = slice(k, k + size)
        total = where(alive, total + product * reward[..., row], total)
        product = where(alive, gamma * product * discount[..., row], product)
        m = m + alive
        alive = alive & ~last[..., row]
    return NStep(total, product, m)


@njit("Tuple((f4[:,::1], f4[:,::1], i8[:,::1]))(f4[:,:], f4[:,:], b1[:,:], i8, f4)")
def _n_step(reward: Array, discount: Array, last: Array, n: int, gamma: Any) -> Any:
    """The definition, row by row. On the small arrays of a CPU learner it takes a tenth of the time of array operations."""
    shape = (reward.shape[0], reward.shape[1] - n)
    total, product, m = np.zeros(shape, np.float32), np.ones(shape, np.float32), np.zeros(shape, np.int64)
    for b in range(shape[0]):
        for t in range(shape[1]):
            for k in range(1, n + 1):
                total[b, t] += product[b, t] * reward[b, t + k]
                product[b, t] *= gamma
                product[b, t] *= discount[b, t + k]
                m[b, t] = k
                if last[b, t + k]:
                    break
    return total, product, m


def rescale(x: Any, eps: float) -> Any:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x (Pohlen et al. 2018): compresses large values and keeps their order."""
    xp = namespace(x)
    return xp.sign(x) * (xp.sqrt(abs(x) + 1) - 1) + eps * x


def unrescale(y: Any, eps: float) -> Any:
    """The inverse of `rescale`, in a form without the cancellation of the textbook one."""
    xp = namespace(y)
    a = abs(y) + 1 + eps
    root = 2 * a / (1 + xp.sqrt(1 + 4 * eps * a))  # sqrt(|x| + 1)
    return xp.sign(y) * (root * root - 1)


class VTrace(NamedTuple):
    target: Any  # [..., T], targets of the values; the value itself where nothing is trained
    advantage: Any  # [..., T], of the actions taken, weighted; 0 where nothing is trained


def vtrace(
    value: Any,
    reward: Any,
    discount: Any,
    trains: Any,
    ratio: Any,
    gamma: float,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg: float = 1.0,
) -> VTrace:
    """V-trace (Espeholt et al. 2018, eq. 1). value, reward and discount are [..., T + 1] with the record's alignment: those
    of step t are reward[t + 1] and discount[t + 1]. trains and ratio = pi / mu of the action taken are [..., T].

    v_s = V_s + sum_{t >= s} (prod_{s <= i < t} gamma_i c_i) rho_t (r_t + gamma_t V_{t+1} - V_t), where rho and c are the
    clipped ratio, c times lambda. The sum ends at a step that is not trained: a row that is not valid, or the last record
    of an episode, whose value bootstraps a truncated one. The advantage is rho^pg_s (r_s + gamma_s v_{s+1} - V_s).
    """
    size = ratio.shape[-1]
    assert value.shape == reward.shape == discount.shape == (*ratio.shape[:-1], size + 1), (value.shape, ratio.shape)
    assert trains.shape == ratio.shape, (trains.shape, ratio.shape)
    if namespace(value) is np:
        columns = (value, reward.astype(np.float32, copy=False), discount, trains, ratio)
        v, r, d, t, w = (x.reshape(-1, x.shape[-1]) for x in columns)
        out = _vtrace(v, r, d, t, w, np.array((gamma, lambda_, clip_rho, clip_c, clip_pg), np.float32))
        return VTrace(*(x.reshape(ratio.shape) for x in out))
    xp = namespace(value)
    gammas = gamma * discount[..., 1:]
    delta = ratio.clip(max=clip_rho) * (reward[..., 1:] + gammas * value[..., 1:] - value[..., :-1]) * trains
    decay = gammas * lambda_ * ratio.clip(max=clip_c) * trains
    correction = [xp.zeros_like(delta[..., 0])]
    for t in range(size - 1, -1, -1):
        correction.append(delta[..., t] + decay[..., t] * correction[-1])
    target = value + xp.stack(correction[::-1], -1)  # [..., T + 1]
    advantage = ratio.clip(max=clip_pg) * (reward[..., 1:] + gammas * target[..., 1:] - value[..., :-1]) * trains
    return VTrace(target[..., :-1], advantage)


@njit("Tuple((f4[:,::1], f4[:,::1]))(f4[:,:], f4[:,:], f4[:,:], b1[:,:], f4[:,:], f4[::1])")
def _vtrace(value: Array, reward: Array, discount: Array, trains: Array, ratio: Array, how: Array) -> Any:
    """Backwards: correction_t = delta_t + gamma_t c_t correction_{t+1}; v_t = V_t + correction_t."""
    gamma, lambda_, rho, c, pg = how[0], how[1], how[2], how[3], how[4]
    target, advantage = np.zeros(ratio.shape, np.float32), np.zeros(ratio.shape, np.float32)
    for b in range(ratio.shape[0]):
        correction = np.float32(0)
        after = value[b, ratio.shape[1]]  # v_{t+1}
        for t in range(ratio.shape[1] - 1, -1, -1):
            if trains[b, t]:
                discounted = gamma * discount[b, t + 1]
                advantage[b, t] = min(pg, ratio[b, t]) * (reward[b, t + 1] + discounted * after - value[b, t])
                delta = min(rho, ratio[b, t]) * (reward[b, t + 1] + discounted * value[b, t + 1] - value[b, t])
                correction = delta + discounted * lambda_ * min(c, ratio[b, t]) * correction
            else:
                correction = np.float32(0)
            after = value[b, t] + correction
            target[b, t] = after
    return target, advantage


def forward_view(value: Array, reward: Array, discount: Array, trains: Array, gamma: float) -> Array:
    """R_t = r_t + gamma_t R_{t+1}, the return of each step up to the end of an unroll (Mnih et al. 2016): [B, T].

    value, reward and discount are [B, T + 1] with the record's alignment, trains is [B, T]. R_T is the value of row T. So
    is that of any row that is not trained, such as the last record of an episode, which bootstraps a truncated one.
    """
    assert value.shape == reward.shape == discount.shape == (len(trains), trains.shape[1] + 1), (value.shape, trains.shape)
    out: Array = _forward_view(value, reward, discount, trains, gamma)
    return out


@njit("f4[:,::1](f4[:,:], f4[:,:], f4[:,:], b1[:,:], f4)")
def _forward_view(value: Array, reward: Array, discount: Array, trains: Array, gamma: Any) -> Any:
    out = np.empty(trains.shape, np.float32)
    for b in range(trains.shape[0]):
        after = value[b, trains.shape[1]]
        for t in range(trains.shape[1] - 1, -1, -1):
            after = reward[b, t + 1] + gamma * discount[b, t + 1] * after if trains[b, t] else value[b, t]
            out[b, t] = after
    return out
