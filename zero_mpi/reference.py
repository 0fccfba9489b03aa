"""The oracle: the same training in one process, in plain loops. No scheme, no ring, no blocks of ours.

Not for: speed or memory; it keeps every rank's gradient at once.

It shares only the model, whose gradients it does not vouch for, and the names of dtypes. Blocks are numpy's
own `array_split`, Adam is written out again, and each block is summed rank by rank in the ring's order.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .data import Batch
from .memory import Ledger
from .model import Model
from .optim import Adam
from .precision import Precision, dtype_of


class Reference:
    """Replay a run of `size` ranks alone.

    Parameters
    ----------
    model, precision, optimizer, init_seed : as the schemes' own.
    size : number of ranks N to replay.

    Attributes
    ----------
    theta : float32, shape (n_params,): the master weights, or the parameters where they are float32.
    """

    def __init__(
        self, model: Model, size: int, precision: Precision, optimizer: Adam, init_seed: int
    ) -> None:
        self.model, self.size, self.precision, self.optimizer = model, size, precision, optimizer
        self.theta = np.concatenate(list(model.init(init_seed)))
        self.m = np.zeros_like(self.theta)
        self.v = np.zeros_like(self.theta)
        self.steps_done = 0
        # Aligned as the schemes' buffers are: BLAS may give other bits elsewhere.
        self._aligned = Ledger()

    def step(self, batches: Sequence[Batch]) -> float:
        """Train on one batch of each rank; return the mean loss before the update."""
        losses, gradients = [], []
        for rank in range(self.size):
            loss, gradient = self._local(batches[rank])
            losses.append(loss)
            gradients.append(gradient)
        mean = [self._mean_of_unit([g[u] for g in gradients]) for u in range(len(self.model.units))]
        self._adam(np.concatenate(mean))
        total = 0.0
        for loss in losses:
            total += loss
        return total / self.size

    def _local(self, batch: Batch) -> tuple[float, list[np.ndarray]]:
        """Return one rank's loss, and its gradient of each unit rounded to the gradients' dtype."""
        x, target = batch
        edges = np.cumsum(self.model.units)[:-1]
        stored = self.theta.astype(dtype_of(self.precision.params)).astype(np.float32)
        units = [self._place(unit) for unit in np.split(stored, edges)]
        saved = []
        for u, params in enumerate(units):
            x, kept = self.model.forward(u, params, x)
            saved.append(kept)
        loss, dy = self.model.loss(x, target)
        gradients = []
        for u in reversed(range(len(units))):
            out = self._place(np.zeros_like(units[u]))
            dy = self.model.backward(u, units[u], saved[u], dy, out=out)  # type: ignore[assignment]
            gradients.append(out.astype(dtype_of(self.precision.grads)))
        return loss, gradients[::-1]

    def _mean_of_unit(self, gradients: list[np.ndarray]) -> np.ndarray:
        """Return the mean over ranks of one unit, float32: block b is summed over ranks b+1, b+2, ..., b."""
        reduce, grads = dtype_of(self.precision.reduce), dtype_of(self.precision.grads)
        wide: Any = np.float64 if reduce == np.float64 else np.float32
        split = [np.array_split(gradient.astype(reduce), self.size) for gradient in gradients]
        means = []
        for b in range(self.size):
            order = [(b + 1 + i) % self.size for i in range(self.size)]
            total = split[order[0]][b]
            for rank in order[1:]:
                total = total + split[rank][b]
            mean = (total.astype(wide) / wide(self.size)).astype(reduce)
            means.append(mean.astype(grads).astype(np.float32))
        return np.concatenate(means)

    def _adam(self, g: np.ndarray) -> None:
        adam = self.optimizer
        self.steps_done += 1
        beta1, beta2 = np.float32(adam.beta1), np.float32(adam.beta2)
        correction = np.sqrt(1 - adam.beta2**self.steps_done)
        rate = np.float32(adam.lr * correction / (1 - adam.beta1**self.steps_done))
        eps = np.float32(adam.eps * correction)
        self.m = beta1 * self.m + np.float32(1 - adam.beta1) * g
        self.v = beta2 * self.v + np.float32(1 - adam.beta2) * (g * g)
        self.theta = self.theta - rate * (self.m / (np.sqrt(self.v) + eps))

    def _place(self, values: np.ndarray) -> np.ndarray:
        array = self._aligned.empty("reference", values.size, values.dtype)
        array[...] = values
        return array
