"""The training loop, the only one. The loop asks, the scheme answers.

Not for: what differs between schemes. It knows only the protocols of model and scheme.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from .data import Batch
from .traffic import Traffic

if TYPE_CHECKING:
    from .schemes.base import Scheme


class NotFinite(FloatingPointError):
    """A loss that is no finite number, which all ranks know of and raise alike.

    losses : by scheme, of the steps before; set by who steps them.
    """

    losses: dict[str, list[float]] = {}


def train_step(scheme: "Scheme", batch: Batch) -> float:
    """Run one step on this rank's `batch`; return the mean over ranks of the loss before the update.

    Parameters
    ----------
    batch : (x, y), float32, shapes (rows, n_in) and (rows, n_out); the same rows on every rank.

    Notes
    -----
    Collective. What `full_params` and `grad_buffer` return is never bound to a name here: a name would keep a
    whole unit alive one turn too long.
    """
    model, comm, ledger = scheme.model, scheme.comm, scheme.ledger
    x, target = checked(batch)
    comm.traffic = Traffic()
    saved: dict[int, Any] = {}

    comm.phase = "forward"
    for u in scheme.units:
        x, saved[u] = model.forward(u, scheme.full_params(u), x)
        ledger.track("activations", x)
        scheme.release_params(u)
    dy: Any
    loss, dy = model.loss(x, target)
    ledger.track("activations", dy)
    del x

    comm.phase = "backward"
    for u in reversed(scheme.units):
        dy = model.backward(u, scheme.full_params(u), saved.pop(u), dy, out=scheme.grad_buffer(u))
        if dy is not None:
            ledger.track("activations", dy)
        scheme.release_params(u)
        scheme.grad_ready(u)
    scheme.backward_done()

    comm.phase = "update"
    scheme.steps_done += 1
    scheme.update(1.0)

    comm.phase = "loss"
    mean = mean_loss(scheme, loss)
    scheme.step_traffic, comm.traffic, comm.phase = comm.traffic, Traffic(), "between steps"
    return mean


def checked(batch: Batch) -> Batch:
    """Return `batch` if it is one: two float32 arrays with as many rows, at least one. Local.

    Raises
    ------
    TypeError, ValueError : it is not; names x or y.
    """
    for name, array in zip(("x", "y"), batch, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: expected a numpy array, got {type(array).__name__}")
        if array.dtype != np.float32 or array.ndim < 1 or len(array) < 1:
            raise ValueError(
                f"{name}: expected float32 rows, at least one, got {array.dtype} of shape {array.shape}"
            )
    x, y = batch
    if len(x) != len(y):
        raise ValueError(f"y: expected as many rows as x, {len(x)}, got {len(y)}")
    return x, y


def mean_loss(scheme: "Scheme", loss: float) -> float:
    """Return the mean over ranks of `loss`, added in rank order in float64. Collective; control traffic.

    Raises
    ------
    NotFinite : a loss is not finite; the same message on all ranks names step and rank.
    """
    losses = scheme.comm.allgather_scalar(loss)
    for rank, value in enumerate(losses):
        if not np.isfinite(value):
            raise NotFinite(
                f"loss: expected a finite number, got {value} on rank {rank} "
                f"in step {scheme.steps_done} of {scheme.name}"
            )
    total = 0.0
    for value in losses:
        total += float(value)
    return total / scheme.comm.size
