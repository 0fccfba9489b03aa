"""Model: the protocol between the training loop and what it trains.

Not for: any model in particular.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np


class Model(Protocol):
    """A chain of units, each a flat float32 vector that is owned, gathered and reduced together.

    Attributes
    ----------
    units : numel of each unit, in the order of the forward pass.
    n_params : their sum, Ψ.
    """

    @property
    def units(self) -> tuple[int, ...]:
        """Number of elements of each unit, in the order of the forward pass."""

    @property
    def n_params(self) -> int:
        """Number of parameters, Ψ: the sum of `units`."""

    def tensors(self, u: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (name, shape) of the tensors that unit `u` is made of, in order."""

    def init(self, seed: int) -> Iterator[np.ndarray]:
        """Yield the initial weights unit by unit, float32, shape (numel,): the same for the same seed."""

    def forward(self, u: int, params: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, Any]:
        """Return the output of unit `u` and what its backward needs, which must not be a view of `params`.

        Counted as activations are arrays, alone and in tuples, lists and dicts; not what another object has.
        """

    def loss(self, y_hat: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the loss and its gradient with respect to `y_hat`."""

    def backward(
        self, u: int, params: np.ndarray, saved: Any, dy: np.ndarray, out: np.ndarray | None
    ) -> np.ndarray | None:
        """Write the gradient of unit `u` into `out`, float32, shape (numel,); None: it is frozen.

        Return the gradient of its input, None where there is no unit before. `dy` may be overwritten.
        """

    def describe(self) -> str:
        """Return one line that differs where models differ."""
