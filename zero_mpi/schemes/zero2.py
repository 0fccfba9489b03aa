"""ZeRO-2: gradients are sharded too; each unit is reduce-scattered as soon as backward has made it.

Not for: how a tool works (base.py) or when it is asked for (engine.py).
"""

from collections.abc import Sequence

import numpy as np

from .base import Scheme


class ZeRO2(Scheme):
    """Parameters are whole, gradients and optimizer state are sharded (ZeRO paper, section 5.2)."""

    name = "ZeRO-2"
    key = "zero2"
    sharded = ("grads", "optimizer")
    reduce_every = "micro-batch"

    def full_params(self, u: int) -> np.ndarray:
        return self.widened(u)

    def release_params(self, u: int) -> None:
        """Nothing to free: this rank holds the unit whole."""

    def grad_ready(self, u: int) -> None:
        self.reduce_scatter(u)

    def backward_done(self, units: Sequence[int]) -> None:
        """Nothing left to reduce: every unit was, when it was ready."""

    def update(self, scale: float) -> None:
        for u in self.trained:
            self.step_optimizer(u, scale)
            self.all_gather(u, self.params[u])
