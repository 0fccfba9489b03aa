"""ZeRO-3: parameters are sharded too; a unit is gathered before each use and freed after it.

Not for: how a tool works (base.py) or when it is asked for (engine.py).
"""

from collections.abc import Sequence

import numpy as np

from .base import Scheme


class ZeRO3(Scheme):
    """Parameters, gradients and optimizer state are sharded (ZeRO paper, section 5.3)."""

    name = "ZeRO-3"
    key = "zero3"
    sharded = ("params", "grads", "optimizer")
    reduce_every = "micro-batch"

    def full_params(self, u: int) -> np.ndarray:
        return self.gathered(u)

    def release_params(self, u: int) -> None:
        self.free_gathered(u)

    def grad_ready(self, u: int) -> None:
        self.reduce_scatter(u)

    def backward_done(self, units: Sequence[int]) -> None:
        """Nothing left to reduce: every unit was, when it was ready."""

    def update(self, scale: float) -> None:
        for u in self.trained:
            self.step_optimizer(u, scale)
