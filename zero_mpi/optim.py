"""Adam on one flat vector. It knows nothing of ranks: which elements it is given is the scheme's business.

Not for: optimizers that mix elements (LAMB's layer norms, Muon's matrices): a shard is not enough for them.
"""

from dataclasses import dataclass

import numpy as np

# Elements updated at a time: four float32 pieces and the scratch stay in a second-level cache of 256 KiB.
PIECE = 8192


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction (Kingma and Ba 2015, algorithm 1), in float32.

    Parameters
    ----------
    lr : learning rate. beta1, beta2 : decay of the two moments. eps : added to the root of the second.

    Raises
    ------
    ValueError : a value outside its range.
    """

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    # The arrays of state it needs for each element, float32, zero at the start.
    slots = ("m", "v")

    def __post_init__(self) -> None:
        for name, value, ok, expected in (
            ("lr", self.lr, 0 < self.lr < np.inf, "a positive number"),
            ("beta1", self.beta1, 0 <= self.beta1 < 1, "at least 0 and below 1"),
            ("beta2", self.beta2, 0 <= self.beta2 < 1, "at least 0 and below 1"),
            ("eps", self.eps, 0 < self.eps < np.inf, "a positive number"),
        ):
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {value}")

    def scratch_numel(self, numel: int) -> int:
        """Return how many float32 elements an update of `numel` elements works in."""
        return 2 * min(PIECE, numel)

    def update(
        self,
        theta: np.ndarray,
        grad: np.ndarray,
        state: dict[str, np.ndarray],
        step: int,
        scale: float = 1.0,
        scratch: np.ndarray | None = None,
    ) -> None:
        """Update `theta` and `state` in place.

        Parameters
        ----------
        theta : float32, shape (n,). The master weights, or the parameters where they are float32.
        grad : shape (n,), any float dtype; read, widened to float32, and multiplied by `scale`.
        state : "m" and "v", float32, shape (n,).
        step : 1 for the first update.
        scratch : float32, at least `scratch_numel(n)` elements, overwritten; None allocates it.

        Notes
        -----
        Element-wise, in pieces that fit a cache, so how a vector is cut changes no bit. With
        c = sqrt(1 - beta2^t), lr m/(1 - beta1^t) / (sqrt(v)/c + eps) is computed as
        (lr c/(1 - beta1^t)) m / (sqrt(v) + eps c): one pass fewer.
        """
        beta1, beta2 = np.float32(self.beta1), np.float32(self.beta2)
        # Subtracted in double: 1 - float32(0.999) is off by 5e-5, which shows in the sixth digit of a loss.
        rest1, rest2 = np.float32(1 - self.beta1), np.float32(1 - self.beta2)
        correction = np.sqrt(1 - self.beta2**step)
        rate = np.float32(self.lr * correction / (1 - self.beta1**step))
        eps = np.float32(self.eps * correction)
        if scratch is None:
            scratch = np.empty(self.scratch_numel(theta.size), np.float32)
        wide, other = np.split(scratch[: self.scratch_numel(theta.size)], 2)
        for start in range(0, theta.size, PIECE):
            piece = slice(start, start + PIECE)
            p, m, v = theta[piece], state["m"][piece], state["v"][piece]
            g, t = wide[: p.size], other[: p.size]
            np.copyto(g, grad[piece], casting="unsafe")
            if scale != 1.0:
                g *= np.float32(scale)
            # m = beta1 m + (1 - beta1) g
            m *= beta1
            np.multiply(g, rest1, out=t)
            m += t
            # v = beta2 v + (1 - beta2) g g
            v *= beta2
            np.multiply(g, g, out=t)
            t *= rest2
            v += t
            # p = p - rate m / (sqrt(v) + eps)
            np.sqrt(v, out=t)
            t += eps
            np.divide(m, t, out=t)
            t *= rate
            p -= t
