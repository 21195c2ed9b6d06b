"""A float64 sum tree in numba: leaves with non-negative mass, drawn in proportion to it.

Every parent is left + right, recomputed and never adjusted by a difference: there is no drift, and a tree rebuilt from
its leaves is bit-identical.
"""

from __future__ import annotations

import numba
import numpy as np

from veldt.tree import Array


class SumTree:
    """Node 1 is the root, nodes size ... 2 * size - 1 are the leaves, the parent of i is i // 2."""

    def __init__(self, leaves: int) -> None:
        assert leaves >= 1, leaves
        self.size = 1 << (leaves - 1).bit_length()
        self.leaves = leaves
        self.nodes = np.zeros(2 * self.size, np.float64)

    @property
    def total(self) -> float:
        return float(self.nodes[1])

    def __getitem__(self, index: Array | slice) -> Array:
        values: Array = self.nodes[self.size : self.size + self.leaves][index]
        return values

    def set(self, index: Array, mass: Array) -> None:
        """Sets leaves; of two equal indices the later wins."""
        if not (np.isfinite(mass).all() and (mass >= 0).all()):
            raise ValueError(f"sum tree: masses must be finite and not negative, got {mass}")
        _set(self.nodes, self.size, index, mass)

    def draw(self, points: Array) -> Array:
        """The leaf below each point of [0, 1) times the total; never one without mass."""
        assert self.total > 0, "sum tree: nothing to draw"
        return _draw(self.nodes, self.size, points)

    def rebuild(self, leaves: Array) -> None:
        self.nodes[:] = 0
        self.nodes[self.size : self.size + len(leaves)] = leaves
        _rebuild(self.nodes, self.size)

    def check_valid(self) -> None:
        nodes, size = self.nodes, self.size
        assert np.isfinite(nodes).all() and (nodes >= 0).all()
        inner = np.arange(1, size)
        assert (nodes[inner] == nodes[2 * inner] + nodes[2 * inner + 1]).all()
        assert (nodes[size + self.leaves :] == 0).all()


@numba.njit("void(f8[::1], i8, i8[::1], f8[::1])", cache=True)
def _set(nodes: Array, size: int, index: Array, mass: Array) -> None:
    for i in range(len(index)):
        node = size + index[i]
        nodes[node] = mass[i]
        node //= 2
        while node >= 1:
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]
            node //= 2


@numba.njit("void(f8[::1], i8)", cache=True)
def _rebuild(nodes: Array, size: int) -> None:
    for node in range(size - 1, 0, -1):
        nodes[node] = nodes[2 * node] + nodes[2 * node + 1]


@numba.njit("i8[::1](f8[::1], i8, f8[::1])", cache=True)
def _draw(nodes: Array, size: int, points: Array) -> Array:
    out = np.empty(len(points), np.int64)
    for i in range(len(points)):
        mass = points[i] * nodes[1]
        node = 1
        while node < size:
            left = 2 * node
            # Round-off may leave mass beyond both children: a child without mass is refused whatever the comparison says.
            if nodes[left + 1] == 0 or (mass < nodes[left] and nodes[left] > 0):
                node = left
            else:
                mass -= nodes[left]
                node = left + 1
        out[i] = node - size
    return out
