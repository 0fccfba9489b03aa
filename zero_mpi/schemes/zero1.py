"""ZeRO-1: optimizer state is sharded; a rank updates its own shard, then parameters are all-gathered.

Not for: how a tool works (base.py) or when it is asked for (engine.py).
"""

from collections.abc import Sequence

import numpy as np

from .base import Scheme


class ZeRO1(Scheme):
    """Parameters and gradients are whole, optimizer state is sharded (ZeRO paper, section 5.1)."""

    name = "ZeRO-1"
    key = "zero1"
    sharded = ("optimizer",)
    reduce_every = "step"

    def full_params(self, u: int) -> np.ndarray:
        return self.widened(u)

    def release_params(self, u: int) -> None:
        """Nothing to free: this rank holds the unit whole."""

    def grad_ready(self, u: int) -> None:
        self.keep_local(u)

    def backward_done(self, units: Sequence[int]) -> None:
        for u in units:
            self.reduce_scatter(u)

    def update(self, scale: float) -> None:
        for u in self.trained:
            self.step_optimizer(u, scale)
            self.all_gather(u, self.params[u])
