"""MLP: linear layers with ReLU between them, forward and backward by hand.

Not for: other losses or layers; those are other models (protocol.py).
"""

from collections.abc import Iterator, Sequence

import numpy as np

# Multiplications in a product that OpenBLAS still calls small: it then copies no operand, where it has a
# kernel for that (AVX-512).
SMALL_PRODUCT = 10**6


class MLP:
    """Linear layers of the widths `dims`, ReLU between them, mean squared error.

    Unit u is layer u: its weights, shape (dims[u], dims[u+1]) in C order, then its bias.

    Parameters
    ----------
    dims : widths, at least two, each at least 1. The default has 33,088 parameters in 3 units.

    Raises
    ------
    ValueError : fewer than two widths, or a width that is not a positive integer.
    """

    def __init__(self, dims: Sequence[int] = (64, 128, 128, 64)) -> None:
        self.dims = tuple(dims)
        if len(self.dims) < 2:
            raise ValueError(f"dims: expected at least two widths, got {self._dims_text()}")
        if any(not isinstance(d, (int, np.integer)) or d < 1 for d in self.dims):
            raise ValueError(f"dims: expected positive integers, got {self._dims_text()}")
        # Sizes of layers overflow numpy's narrower integers.
        self.dims = tuple(map(int, self.dims))

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(i * o + o for i, o in zip(self.dims, self.dims[1:], strict=False))

    @property
    def n_params(self) -> int:
        return sum(self.units)

    def tensors(self, u: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return "weight", (dims[u], dims[u+1]), and "bias", (dims[u+1],)."""
        fan_in, fan_out = self.dims[u], self.dims[u + 1]
        return ("weight", (fan_in, fan_out)), ("bias", (fan_out,))

    def init(self, seed: int = 0) -> Iterator[np.ndarray]:
        """Yield each layer: weights standard normal times sqrt(2 / fan_in) (He et al. 2015), biases zero."""
        rng = np.random.default_rng(seed)
        for fan_in, fan_out in zip(self.dims, self.dims[1:], strict=False):
            theta = np.zeros(fan_in * fan_out + fan_out, np.float32)
            weights, _ = self._split_by(fan_in, fan_out, theta)
            # Row by row: drawn in double all at once they would take twice the layer's own memory.
            for row in weights:
                row[...] = rng.standard_normal(fan_out) * np.sqrt(2.0 / fan_in)
            yield theta
            # Else this layer would live on while the next one is made.
            del theta, weights, row

    def forward(
        self, u: int, params: np.ndarray, x: np.ndarray
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Return ``relu(x @ W + b)``, shape (rows, dims[u+1]); the last unit is linear. Save both ends."""
        weights, bias = self._split(u, params)
        y = x @ weights
        y += bias
        if u < len(self.units) - 1:
            np.maximum(y, 0, out=y)
        return y, (x, y)

    def loss(self, y_hat: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the mean over all elements of (y_hat - y)^2 and its gradient 2 (y_hat - y) / y.size.

        Raises ValueError where shapes differ: numpy would stretch one over the other in silence.
        """
        if y.shape != y_hat.shape:
            raise ValueError(f"y: expected shape {y_hat.shape}, got {y.shape}")
        difference = y_hat - y
        loss = float(np.mean(difference * difference))
        difference *= np.float32(2.0 / y.size)
        return loss, difference

    def backward(
        self,
        u: int,
        params: np.ndarray,
        saved: tuple[np.ndarray, np.ndarray],
        dy: np.ndarray,
        out: np.ndarray | None,
    ) -> np.ndarray | None:
        """Write the gradient of layer `u` into `out`; return that of its input, None for the first."""
        x, y = saved
        if u < len(self.units) - 1:
            dy *= y > 0
        weights, _ = self._split(u, params)
        if out is not None:
            d_weights, d_bias = self._split(u, out)
            _products_of_columns(x, dy, out=d_weights)
            np.sum(dy, axis=0, out=d_bias)
        if u == 0:
            return None
        # dy @ weights.T; BLAS is up to twice as fast where the large matrix comes first and as it lies.
        return np.ascontiguousarray((weights @ dy.T).T)

    def describe(self) -> str:
        return f"MLP {self._dims_text()}"

    def _split(self, u: int, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the weights and the bias of unit `u` as views of `flat`."""
        return self._split_by(self.dims[u], self.dims[u + 1], flat)

    @staticmethod
    def _split_by(fan_in: int, fan_out: int, flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return flat[: fan_in * fan_out].reshape(fan_in, fan_out), flat[fan_in * fan_out :]

    def _dims_text(self) -> str:
        return ",".join(str(d) for d in self.dims)


def _products_of_columns(x: np.ndarray, dy: np.ndarray, out: np.ndarray) -> None:
    """Write ``x.T @ dy``, a large matrix from few rows, into `out`: in small products if they are few."""
    piece = SMALL_PRODUCT // max(1, dy.size)
    if piece < 32:
        piece = len(out)
    for start in range(0, len(out), piece):
        np.matmul(x.T[start : start + piece], dy, out=out[start : start + piece])
