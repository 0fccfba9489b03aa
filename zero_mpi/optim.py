"""Optimizers on one flat vector. They know nothing of ranks: a scheme chooses which elements they get.

Not for: optimizers that mix elements, such as LAMB (a norm for each layer) or Muon (a matrix as a whole): a
rank that holds a shard of a unit has not what they need, and another cut would change the result.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .precision import LEAST, MOST

# Elements updated at a time. A call of numpy costs as much as a pass over 4000 elements in a cache, so pieces
# are as large as a second-level cache of 1 MiB allows: four of them in float32 and the scratch take 768 KiB.
PIECE = 32768

State = dict[str, np.ndarray]


class Optimizer(Protocol):
    """An element-wise optimizer.

    Attributes
    ----------
    slots : names of the float32 arrays of state it needs for each element, zero at the start.
    lr : learning rate. weight_decay : decoupled; 0 for none.
    """

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the arrays of state."""

    @property
    def lr(self) -> float:
        """Learning rate."""

    @property
    def weight_decay(self) -> float:
        """Decay of the weights, decoupled from the gradient; 0 for none."""

    def describe(self) -> str:
        """Return its name and numbers, all digits of them: reports print it, and ranks compare it."""

    def scratch_numel(self, numel: int) -> int:
        """Return how many float32 elements an update of `numel` elements works in."""

    def update(
        self,
        theta: np.ndarray,
        grad: np.ndarray,
        state: State,
        step: int,
        *,
        scale: float = 1.0,
        lr: float | None = None,
        decay: bool = True,
        scratch: np.ndarray | None = None,
    ) -> None:
        """Update `theta` and `state` in place.

        Parameters
        ----------
        theta : float32, shape (n,). The master weights, or the parameters where they are float32.
        grad : shape (n,), any float dtype; read, widened to float32, and multiplied by `scale`.
        state : one float32 array of shape (n,) for each slot.
        step : 1 for the first update.
        lr : learning rate of this update; None for the optimizer's own.
        decay : whether these elements' weights decay.
        scratch : float32, at least `scratch_numel(n)` elements, overwritten; None allocates it.
        """


class _Pieces:
    """What optimizers share: two pieces of scratch, and the gradient in float32 and to scale."""

    def scratch_numel(self, numel: int) -> int:
        """Return how many float32 elements an update of `numel` elements works in."""
        return 2 * min(PIECE, numel)

    def _two(self, numel: int, scratch: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        if scratch is None:
            scratch = np.empty(self.scratch_numel(numel), np.float32)
        half = min(PIECE, numel)
        return scratch[:half], scratch[half : 2 * half]

    @staticmethod
    def _scaled(grad: np.ndarray, scale: float, out: np.ndarray) -> np.ndarray:
        """Return `grad` in float32 times `scale`: itself where that is the same, else in `out`."""
        if scale != 1.0:
            np.copyto(out, grad, casting="unsafe")
            out *= np.float32(scale)
            return out
        if grad.dtype == np.float32:
            return grad
        np.copyto(out, grad, casting="unsafe")
        return out


@dataclass(frozen=True)
class Adam(_Pieces):
    """Adam with bias correction (Kingma and Ba 2015, algorithm 1), in float32.

    With `weight_decay` it is AdamW: weights shrink by lr weight_decay before the step, apart from the
    gradient (Loshchilov and Hutter 2019).

    Parameters
    ----------
    lr : learning rate. beta1, beta2 : decay of the two moments. eps : added to the root of the second.
    weight_decay : decoupled; 0 for none.

    Raises
    ------
    ValueError : a value outside its range.
    """

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    slots = ("m", "v")

    def __post_init__(self) -> None:
        least_eps = LEAST / max(1 - self.beta2, LEAST) ** 0.5
        for name, value, ok, expected in (
            ("lr", self.lr, LEAST <= self.lr <= MOST, f"a number from {LEAST} to {MOST}"),
            ("beta1", self.beta1, 0 <= self.beta1 < 1, "at least 0 and below 1"),
            ("beta2", self.beta2, 0 <= self.beta2 < 1, "at least 0 and below 1"),
            # In the first update it is multiplied by the root, and 0 / 0 would be no number.
            ("eps", self.eps, least_eps <= self.eps <= MOST, f"a number from {least_eps} to {MOST}"),
            ("weight_decay", self.weight_decay, 0 <= self.weight_decay <= MOST, f"a number from 0 to {MOST}"),
        ):
            if not ok:
                raise ValueError(f"{name}: expected {expected}, got {value}")

    def describe(self) -> str:
        text = f"lr {self.lr}, betas {self.beta1} {self.beta2}, eps {self.eps}"
        if self.weight_decay:
            return f"AdamW {text}, weight decay {self.weight_decay}"
        return f"Adam {text}"

    def update(
        self,
        theta: np.ndarray,
        grad: np.ndarray,
        state: State,
        step: int,
        *,
        scale: float = 1.0,
        lr: float | None = None,
        decay: bool = True,
        scratch: np.ndarray | None = None,
    ) -> None:
        """Update `theta`, "m" and "v" in place (see Optimizer.update).

        Notes
        -----
        Element-wise, in pieces that fit a cache, so how a vector is cut changes no bit. With
        c = sqrt(1 - beta2^t), lr m/(1 - beta1^t) / (sqrt(v)/c + eps) is computed as
        (lr c/(1 - beta1^t)) m / (sqrt(v) + eps c): one pass fewer.
        """
        lr = self.lr if lr is None else lr
        beta1, beta2 = np.float32(self.beta1), np.float32(self.beta2)
        # Subtracted in double: 1 - float32(0.999) is off by 5e-5, which shows in the sixth digit of a loss.
        rest1, rest2 = np.float32(1 - self.beta1), np.float32(1 - self.beta2)
        correction = np.sqrt(1 - self.beta2**step)
        rate = np.float32(lr * correction / (1 - self.beta1**step))
        eps = np.float32(self.eps * correction)
        keep = np.float32(1 - lr * self.weight_decay) if decay else np.float32(1)
        wide, other = self._two(theta.size, scratch)
        for start in range(0, theta.size, PIECE):
            piece = slice(start, start + PIECE)
            p, m, v = theta[piece], state["m"][piece], state["v"][piece]
            g, t = self._scaled(grad[piece], scale, wide[: p.size]), other[: p.size]
            # m = beta1 m + (1 - beta1) g
            m *= beta1
            np.multiply(g, rest1, out=t)
            m += t
            # v = beta2 v + (1 - beta2) g g
            v *= beta2
            np.multiply(g, g, out=t)
            t *= rest2
            v += t
            # p = keep p - rate m / (sqrt(v) + eps)
            np.sqrt(v, out=t)
            t += eps
            np.divide(m, t, out=t)
            t *= rate
            if keep != 1:
                p *= keep
            p -= t


@dataclass(frozen=True)
class SGD(_Pieces):
    """Stochastic gradient descent, with momentum where asked for: b = momentum b + g, p = p - lr b.

    Without momentum it keeps no state at all.

    Parameters
    ----------
    lr : learning rate. momentum : at least 0 and below 1.

    Raises
    ------
    ValueError : a value outside its range.
    """

    lr: float = 1e-2
    momentum: float = 0.0

    weight_decay = 0.0

    def __post_init__(self) -> None:
        if not LEAST <= self.lr <= MOST:
            raise ValueError(f"lr: expected a number from {LEAST} to {MOST}, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: expected at least 0 and below 1, got {self.momentum}")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def describe(self) -> str:
        return f"SGD lr {self.lr}" + (f", momentum {self.momentum}" if self.momentum else "")

    def update(
        self,
        theta: np.ndarray,
        grad: np.ndarray,
        state: State,
        step: int,
        *,
        scale: float = 1.0,
        lr: float | None = None,
        decay: bool = True,
        scratch: np.ndarray | None = None,
    ) -> None:
        """Update `theta`, and "momentum" where there is one, in place (see Optimizer.update)."""
        rate = np.float32(self.lr if lr is None else lr)
        wide, other = self._two(theta.size, scratch)
        for start in range(0, theta.size, PIECE):
            piece = slice(start, start + PIECE)
            p = theta[piece]
            g, t = self._scaled(grad[piece], scale, wide[: p.size]), other[: p.size]
            if self.momentum:
                b = state["momentum"][piece]
                b *= np.float32(self.momentum)
                b += g
                g = b
            np.multiply(g, rate, out=t)
            p -= t
