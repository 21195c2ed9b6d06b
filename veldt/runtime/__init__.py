"""Runtimes: where the nodes of a program run."""

from __future__ import annotations

from veldt.runtime.base import Nodes, Runtime, Stuck
from veldt.runtime.inline import Inline

__all__ = ["Inline", "Nodes", "Runtime", "Stuck"]
