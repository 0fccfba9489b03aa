"""The training loop, the only one. The loop asks, the scheme answers.

Not for: what differs between schemes. It knows only the protocols of model and scheme.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .comm import SharedMistake
from .data import Batch
from .memory import Ledger, owner
from .traffic import Traffic

if TYPE_CHECKING:
    from .schemes.base import Scheme


# What a rank says in place of its rows: that it has no batch left, or how many micro-batches it got instead.
_NONE_LEFT, _WRONG_NUMBER = -1, -2


class NotFinite(FloatingPointError):
    """A loss or a gradient that is no finite number, which all ranks know of and raise alike.

    losses, chains : by scheme, of the steps before: losses, and digests if they were taken; set by who steps
        them.
    """

    losses: dict[str, list[float]] = {}
    chains: dict[str, Any] = {}


class OutOfBatches(SharedMistake):
    """A rank has no batch left; all ranks raise it in the same step, before anything is computed."""


def train_step(scheme: "Scheme", micro_batches: Sequence[Batch | None]) -> float:
    """Run one step on this rank's `micro_batches`; return the mean loss over all rows before the update.

    Notes
    -----
    Collective. What `full_params` and `grad_buffer` return is never bound to a name here: a name would keep a
    whole unit alive one turn too long.
    """
    comm = scheme.comm
    comm.traffic, comm.phase = Traffic(), "forward"
    scheme.steps_begun += 1
    batches, weights = _weighted(scheme, micro_batches)
    scheme.forget_transients()
    scheme.overflowed.clear()
    scheme.sums_overflowed.clear()
    loss = 0.0
    # What overflows is looked for and agreed on, not warned of by each rank.
    with np.errstate(over="ignore", invalid="ignore"):
        for scheme.micro_batch, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            loss += weight * _forward_backward(scheme, batch, weight * scheme.scale.value)
        if scheme.reduce_every == "step":
            scheme.backward_done(scheme.trained)
        outcome = _agreed(scheme, loss)
        comm.phase = "update"
        scheme.grad_norm, scheme.skipped = outcome.norm, outcome.skip
        if not outcome.skip:
            scheme.steps_done += 1
            scheme.update(outcome.scale)
    scheme.step_traffic, comm.traffic, comm.phase = comm.traffic, Traffic(), "between steps"
    return outcome.loss


def _forward_backward(scheme: "Scheme", batch: Batch, scale: float) -> float:
    """Run one micro-batch, its loss's gradient times `scale`; return the mean loss of its rows."""
    model, comm, ledger = scheme.model, scheme.comm, scheme.ledger
    last = scheme.micro_batch == scheme.training.accumulate - 1
    x, target = batch
    given = owner(x)
    saved: dict[int, Any] = {}

    comm.phase = "forward"
    for u in scheme.units:
        x, saved[u] = model.forward(u, scheme.full_params(u), x)
        _track(ledger, (x, saved[u]), given)
        scheme.release_params(u)
    dy: Any
    # A rank that has no rows takes part with zeros.
    loss, dy = model.loss(x, target) if len(target) else (0.0, np.zeros_like(x))
    if scale != 1.0:
        dy = dy * np.float32(scale)
    _track(ledger, dy, given)
    del x

    comm.phase = "backward"
    for u in range(len(scheme.units) - 1, scheme.trained[0] - 1, -1):
        trained = u in scheme.trained
        out = scheme.grad_buffer if trained else _nothing
        dy = model.backward(u, scheme.full_params(u), saved.pop(u), dy, out=out(u))
        _track(ledger, dy, given)
        scheme.release_params(u)
        if trained and scheme.reduce_every == "step" and not last:
            # Only kept: it is reduced with the last micro-batch, whatever the scheme would do.
            scheme.keep_local(u)
        elif trained:
            scheme.grad_ready(u)
            if scheme.reduce_every == "micro-batch":
                scheme.backward_done([u])
    return loss


def _weighted(scheme: "Scheme", micro_batches: Sequence[Batch | None]) -> tuple[list[Batch], list[float]]:
    """Return this rank's micro-batches, and the weight of each in the mean over all rows. Collective.

    Of N ranks and K micro-batches, one with `rows` of all rows weighs N K rows / all: exactly 1 where they
    are equal, so it changes no bit there. Control traffic: K numbers.
    """
    comm, count = scheme.comm, scheme.training.accumulate
    given = [batch for batch in micro_batches if batch is not None]
    batches: list[Batch] = []
    if len(given) == len(micro_batches) == count:
        batches = [checked(batch) for batch in given]
        mine = [len(y) for _, y in batches]
    elif len(micro_batches) == 1 and not given:
        mine = [_NONE_LEFT] * count
    else:
        mine = [_WRONG_NUMBER - len(given)] * count
    rows = comm.allgather_array(np.array(mine, np.int64))
    rank, fewest = int(np.argmin(rows.min(axis=1))), int(rows.min())
    if fewest <= _WRONG_NUMBER:
        raise SharedMistake(
            f"step: expected {count} micro-batches, or a single None, got {_WRONG_NUMBER - fewest} "
            f"on rank {rank}"
        )
    if fewest == _NONE_LEFT:
        raise OutOfBatches(
            f"batches: expected as many on every rank, but rank {rank} has none left for step "
            f"{scheme.steps_begun}: training ends here"
        )
    total = int(rows.sum())
    if total == 0:
        raise SharedMistake(f"batches: expected rows on some rank, got none in step {scheme.steps_begun}")
    return batches, [comm.size * count * int(n) / total for n in rows[comm.rank]]


class _Outcome(NamedTuple):
    """What all ranks agree on after backward: the mean loss, the norm, the update's scale, or why to skip."""

    loss: float
    norm: float | None
    scale: float
    skip: str


def _agreed(scheme: "Scheme", loss: float) -> _Outcome:
    """Put together what each rank knows of this step, and decide on the update. Collective; control traffic.

    Raises
    ------
    NotFinite : a loss is not finite; or a gradient is not, and there is no loss scale to lower.
    """
    comm, job = scheme.comm, scheme.training
    squares = scheme.squares() if job.clip_norm is not None else 0.0
    rows = comm.allgather_array(np.array([loss, _overflow_code(scheme), squares], np.float64))
    where = f"in step {scheme.steps_begun} of {scheme.name}"
    overflow = _overflow_words(rows[:, 1], len(scheme.units))
    goes_on, hint = bool(overflow) and scheme.scale.overflowed(), ""
    if overflow and not goes_on and job.loss_scale is not None:
        hint = f"; the loss scale, {scheme.scale.value:g}, may not fall below {job.loss_scale.floor:g}"
    for rank, (value, _, _) in enumerate(rows):
        # A dynamic scale skips whatever is not finite until its floor. A fixed one stays, and a loss is taken
        # before it is scaled.
        if not np.isfinite(value) and not (goes_on and job.loss_scale and job.loss_scale.dynamic):
            raise NotFinite(f"loss: expected a finite number, got {value} on rank {rank} {where}{hint}")
    if overflow and not goes_on:
        raise NotFinite(f"gradient: expected finite numbers, got NaN or infinity in {overflow} {where}{hint}")
    # Added in rank order in float64, so it is the same on every rank and in every scheme.
    mean = total = 0.0
    for value, _, square in rows:
        mean += float(value)
        total += float(square)
    mean /= comm.size * job.accumulate
    if overflow:
        return _Outcome(mean, None, 0.0, f"the gradient of {overflow} overflowed")
    scale = 1.0 / scheme.scale.value
    norm = None
    if job.clip_norm is not None:
        norm = float(np.sqrt(total)) / scheme.scale.value
        scale *= min(1.0, job.clip_norm / norm) if norm else 1.0
    scheme.scale.good()
    return _Outcome(mean, norm, scale, "")


def _overflow_code(scheme: "Scheme") -> int:
    """Return the first unit whose gradient is not finite on this rank; number of units + u if only a sum is.

    A gradient that overflowed makes the sum overflow too, on whoever owns it: who began it has to be named.
    """
    none = 2 * len(scheme.units)
    return min(
        min(scheme.overflowed, default=none), len(scheme.units) + min(scheme.sums_overflowed, default=none)
    )


def _overflow_words(codes: np.ndarray, units: int) -> str:
    """Return which gradient overflowed and on which rank, from all ranks' codes; "" if none did."""
    rank = int(np.argmin(codes))
    code = int(codes[rank])
    if code >= 2 * units:
        return ""
    return f"unit {code} on rank {rank}" if code < units else f"unit {code - units}, summed on rank {rank},"


def checked(batch: Batch) -> Batch:
    """Return `batch` if it is one: two float32 arrays with as many rows. Local.

    Raises
    ------
    TypeError, ValueError : it is not; names x or y.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"batch: expected a pair (x, y), got {type(batch).__name__}")
    for name, array in zip(("x", "y"), batch, strict=True):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: expected a numpy array, got {type(array).__name__}")
        if array.dtype != np.float32 or array.ndim < 1:
            raise ValueError(f"{name}: expected float32 rows, got {array.dtype} of shape {array.shape}")
    x, y = batch
    if len(x) != len(y):
        raise ValueError(f"y: expected as many rows as x, {len(x)}, got {len(y)}")
    return x, y


def _track(ledger: Ledger, value: Any, given: np.ndarray) -> None:
    """Count the arrays in `value` as activations, but for the batch that was given."""
    if isinstance(value, np.ndarray):
        if owner(value) is not given:
            ledger.track("activations", value)
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _track(ledger, item, given)


def _nothing(u: int) -> None:
    """Return where the gradient of a frozen unit goes."""
