"""Data parallel: every rank holds everything; gradients are all-reduced.

Not for: how a tool works (base.py) or when it is asked for (engine.py).
"""

from collections.abc import Sequence

import numpy as np

from .base import Scheme


class DP(Scheme):
    """Parameters, gradients and optimizer state are whole on every rank (ZeRO paper, section 3.1)."""

    name = "data parallel"
    key = "dp"
    sharded = ()
    reduce_every = "step"

    def full_params(self, u: int) -> np.ndarray:
        return self.widened(u)

    def release_params(self, u: int) -> None:
        """Nothing to free: this rank holds the unit whole."""

    def grad_ready(self, u: int) -> None:
        self.keep_local(u)

    def backward_done(self, units: Sequence[int]) -> None:
        for u in units:
            self.all_reduce(u)

    def update(self, scale: float) -> None:
        for u in self.trained:
            self.step_optimizer(u, scale)
