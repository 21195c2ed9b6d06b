"""Returns, as pure functions of time-major columns `[..., T]`, on numpy or torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from veldt.tree import namespace


class NStep(NamedTuple):
    """For each step t: reward_t = sum of m discounted rewards, to be bootstrapped with discount_t * value[t + m]."""

    reward: Any  # [..., T - n]
    discount: Any  # [..., T - n], 0 where the episode terminated within m steps
    m: Any  # [..., T - n], n or the steps to the episode's last record if that is nearer


def n_step(reward: Any, discount: Any, last: Any, n: int, gamma: float) -> NStep:
    """G_t = sum_{k=1..m} gamma^(k-1) r_{t+k} + gamma^m v_{t+m}, m = min(n, steps until `last`).

    All inputs are [..., T] with the record's alignment: reward[t] and discount[t] belong to ARRIVING at t. A discount of
    0 stops the sum and the bootstrap; `last` with discount 1 (truncation) stops the sum and keeps the bootstrap.
    """
    assert n >= 1, n
    size = reward.shape[-1] - n
    assert size >= 1, (reward.shape, n)
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
