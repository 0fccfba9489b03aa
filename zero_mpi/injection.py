"""Injection: known mistakes, each one small function, switched on to prove that the checks see them.

Not for: schemes, which know nothing of it. A mistake replaces a tool of one scheme object, its reducer, its
communicator, its model or its data; where none is asked for, nothing is touched.

A new one is a function and its line above it. It says which check must see it, and what the cause must be
called (parting.py); `python -m zero_mpi faults` holds both against what happens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .data import Data, MicroBatches
from .model import Model
from .precision import round_through
from .schemes import SCHEMES, Scheme

ALL = tuple(S.key for S in SCHEMES)
SHARDED = ALL[1:]

# From this step on, where a mistake needs a step before it.
LATE = 3

# The rank that makes the mistakes of one rank.
CULPRIT = 1


class Fault(NamedTuple):
    """A known mistake.

    Fields
    ------
    name, what : as `--inject` takes it, and in a line. schemes : keys of those it applies to.
    check : the check that must fail; or "set-up", "non-finite" or "order", an error that must come.
    cause : the class that it must be given; "" where no number parts.
    needs : options of a run without which it does nothing, such as accumulate=2.
    least_ranks, least_steps, least_units : from how many on it is a mistake at all.
    scheme : changes a scheme object that was just built. model, data : return what a rank gets instead.
    """

    name: str
    what: str
    schemes: tuple[str, ...]
    check: str
    cause: str
    needs: dict[str, Any]
    least_ranks: int = 2
    least_steps: int = 1
    least_units: int = 1
    scheme: Callable[[Any], None] | None = None
    model: Callable[[Model, int], Model] | None = None
    data: Callable[[Data, int], Data] | None = None


FAULTS: dict[str, Fault] = {}


def check_makes_a_difference(
    fault: Fault, schemes: Sequence[str], ranks: int, steps: int, units: int, **options: Any
) -> None:
    """Raise ValueError if `fault` would do nothing in a run. Local.

    Parameters
    ----------
    schemes : keys of those that run. options : of the run, as a Fault's `needs` names them.
    """
    name = f"--inject {fault.name}"
    for what, got in (("ranks", ranks), ("steps", steps), ("units", units)):
        least = getattr(fault, f"least_{what}")
        if got < least:
            raise ValueError(f"{name}: expected at least {least} {what}, got {got}")
    if not set(schemes) & set(fault.schemes):
        raise ValueError(f"{name}: expected --scheme {' or '.join(fault.schemes)}, got {', '.join(schemes)}")
    for option, value in fault.needs.items():
        least = 2 if option == "accumulate" else None
        if options[option] is None or options[option] is False or (least and options[option] < least):
            text = "" if value is True else f" {value}"
            raise ValueError(f"{name}: expected --{option.replace('_', '-')}{text} beside it")


def fault(
    name: str,
    check: str,
    cause: str = "",
    schemes: tuple[str, ...] = ALL,
    on: str = "scheme",
    least_ranks: int = 2,
    least_steps: int = 1,
    least_units: int = 1,
    **needs: Any,
) -> Callable[[Callable], Callable]:
    """Enter a function as the fault called `name`; its docstring says what it is. on : what it changes."""

    def enter(function: Callable) -> Callable:
        what = (function.__doc__ or "").strip().rstrip(".")
        changed: dict[str, Any] = {on: function}
        FAULTS[name] = Fault(
            name, what, schemes, check, cause, needs, least_ranks, least_steps, least_units, **changed
        )
        return function

    return enter


def _instead(owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replace a method of one object by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def _reduced_by(scheme: Scheme, change: Callable[[int, np.ndarray], None]) -> None:
    """Call `change(u, x)` with each local gradient, before it is reduced."""

    def make(unreduced: Callable) -> Callable:
        def changed(u: int) -> np.ndarray:
            x = unreduced(u)
            change(u, x)
            return x

        return changed

    _instead(scheme, "_unreduced", make)


def _averaged_by(scheme: Scheme, change: Callable[[np.ndarray], None]) -> None:
    """Call `change(mean)` with each mean gradient, and round it again."""

    def make(average: Callable) -> Callable:
        def changed(u: int, total: np.ndarray, into: np.ndarray) -> None:
            average(u, total, into)
            change(into)
            round_through(into, into, scheme._grads_dtype)

        return changed

    _instead(scheme, "average", make)


# Gradients.


@fault("drop-reduction", "learning", "missing contribution", least_units=2)
def drop_reduction(scheme: Any) -> None:
    """Unit 1 is not reduced: each rank keeps its own gradient."""
    reducer = scheme.reducer

    def scatter(reduce_scatter: Callable) -> Callable:
        def kept(u: int, x: np.ndarray) -> np.ndarray:
            own = x[scheme.blocks[u].of(scheme.comm.rank)]
            return own.copy() if u == 1 else reduce_scatter(u, x)

        return kept

    def whole(all_reduce: Callable) -> Callable:
        def kept(u: int, x: np.ndarray, finish: Callable) -> None:
            if u == 1:
                finish(x)
            else:
                all_reduce(u, x, finish)

        return kept

    _instead(reducer, "reduce_scatter", scatter)
    _instead(reducer, "all_reduce", whole)


@fault("reduce-twice", "learning", "divisor or scale")
def reduce_twice(scheme: Any) -> None:
    """Each unit is reduced twice, and both sums are added."""

    def scatter(reduce_scatter: Callable) -> Callable:
        def twice(u: int, x: np.ndarray) -> np.ndarray:
            first = reduce_scatter(u, x.copy())
            return first + reduce_scatter(u, x)

        return twice

    def whole(all_reduce: Callable) -> Callable:
        def twice(u: int, x: np.ndarray, finish: Callable) -> None:
            first = x.copy()
            for sum_of in (first, x):
                all_reduce(u, sum_of, lambda own: None)
            x += first
            finish(x)

        return twice

    _instead(scheme.reducer, "reduce_scatter", scatter)
    _instead(scheme.reducer, "all_reduce", whole)


@fault("divide-twice", "learning", "divisor or scale")
def divide_twice(scheme: Any) -> None:
    """The sum over ranks is divided by N twice."""
    _averaged_by(scheme, lambda mean: np.divide(mean, np.float32(scheme.comm.size), out=mean))


@fault("divide-never", "learning", "divisor or scale")
def divide_never(scheme: Any) -> None:
    """The sum over ranks is not divided by N."""
    _averaged_by(scheme, lambda mean: np.multiply(mean, np.float32(scheme.comm.size), out=mean))


@fault("sum-micro-batches", "learning", "divisor or scale", accumulate=2)
def sum_micro_batches(scheme: Any) -> None:
    """Micro-batches are added up, but not averaged."""
    _averaged_by(scheme, lambda mean: np.multiply(mean, np.float32(scheme.training.accumulate), out=mean))


@fault("only-last-rank", "learning", "missing contribution")
def only_last_rank(scheme: Any) -> None:
    """Only the last rank's gradient reaches the sum."""

    def silence(u: int, x: np.ndarray) -> None:
        if scheme.comm.rank != scheme.comm.size - 1:
            x[...] = 0

    _reduced_by(scheme, silence)


@fault("only-last-micro-batch", "learning", "missing contribution", accumulate=2)
def only_last_micro_batch(scheme: Any) -> None:
    """The gradient of the last micro-batch takes the place of those before it."""

    def make(take: Callable) -> Callable:
        def forgetful(u: int) -> None:
            if scheme.micro_batch < scheme.training.accumulate - 1:
                scheme._local_gradients[u][...] = 0
            take(u)

        return forgetful

    _instead(scheme, "keep_local", make)
    _instead(scheme, "grad_ready", make)


@fault("count-a-rank-twice", "learning", "doubled contribution")
def count_a_rank_twice(scheme: Any) -> None:
    """Rank 1's gradient is in the sum twice."""

    def double(u: int, x: np.ndarray) -> None:
        if scheme.comm.rank == CULPRIT:
            x *= 2

    _reduced_by(scheme, double)


@fault("stale-gradient", "learning", "stale", least_steps=LATE)
def stale_gradient(scheme: Any) -> None:
    """From the third update on unit 0 is updated with the gradient of the one before."""
    kept: list[np.ndarray] = []

    def make(update: Callable) -> Callable:
        def late(scale: float) -> None:
            now = scheme.grads[0].copy()
            if scheme.steps_done >= LATE:
                scheme.grads[0][...] = kept[-1]
            kept[:] = [now]
            update(scale)

        return late

    _instead(scheme, "update", make)


# Of two terms there is one sum: a + b = b + a.
@fault("rotated-ring", "learning", "summation order", least_ranks=3)
def rotated_ring(scheme: Any) -> None:
    """The ring starts each block a rank late: other bits, but where 16-bit terms add up exactly."""
    comm = scheme.comm

    def scatter(u: int, x: np.ndarray) -> np.ndarray:
        comm.unit = u
        parts = [x[part] for part in scheme.blocks[u].slices()]
        mine = parts[comm.rank]
        came = np.empty((comm.size, mine.size), x.dtype)
        came[comm.rank] = mine
        with comm.collective("reduce-scatter"):
            for step in range(1, comm.size):
                dest, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
                comm.sendrecv(parts[dest], dest, came[source], source)
        total = came[(comm.rank + 2) % comm.size]
        for i in range(3, comm.size + 2):
            total = total + came[(comm.rank + i) % comm.size]
        return total.copy()

    def whole(u: int, x: np.ndarray, finish: Callable) -> None:
        own = scatter(u, x)
        finish(own)
        x[scheme.blocks[u].of(comm.rank)] = own
        scheme.reducer.all_gather(u, x)

    scheme.reducer.reduce_scatter, scheme.reducer.all_reduce = scatter, whole


@fault("off-by-one", "learning", "wrong block")
def off_by_one(scheme: Any) -> None:
    """The bounds of blocks are off by one when gradients are reduced."""

    def make(reduce: Callable) -> Callable:
        def shifted(u: int, x: np.ndarray, *finish: Callable) -> Any:
            x[...] = np.roll(x, -1)
            return reduce(u, x, *finish)

        return shifted

    _instead(scheme.reducer, "reduce_scatter", make)
    _instead(scheme.reducer, "all_reduce", make)


# Updates.


@fault("skip-all-gather", "learning", "stale", schemes=("zero1", "zero2"), least_steps=LATE)
def skip_all_gather(scheme: Any) -> None:
    """From step 3 on unit 0 is not gathered after its update."""

    def make(all_gather: Callable) -> Callable:
        def skipping(u: int, full: np.ndarray) -> None:
            if u != 0 or scheme.steps_begun < LATE:
                all_gather(u, full)

        return skipping

    _instead(scheme, "all_gather", make)


@fault("neighbours-gradient", "learning", "wrong block", schemes=SHARDED)
def neighbours_gradient(scheme: Any) -> None:
    """A shard is updated with the gradient of its left neighbour's."""
    # Counted elsewhere: the mistake is to use it, not to have asked for it.
    beside = scheme.comm.counted_apart()

    def make(step_optimizer: Callable) -> Callable:
        def misled(u: int, scale: float) -> None:
            own = next(array for name, _, _, array in scheme.owned(u) if name == "grads")
            right = own.copy()
            blocks = beside.allgather_bytes(right.tobytes())
            left = np.frombuffer(blocks[(beside.rank - 1) % beside.size], own.dtype)
            own[...] = np.resize(left, own.size)
            step_optimizer(u, scale)
            own[...] = right

        return misled

    _instead(scheme, "step_optimizer", make)


@fault("one-step-behind", "learning", "stale", least_steps=LATE)
def one_step_behind(scheme: Any) -> None:
    """From step 3 on rank 1 leaves out its update."""

    def make(step_optimizer: Callable) -> Callable:
        def lazy(u: int, scale: float) -> None:
            if scheme.comm.rank != CULPRIT or scheme.steps_begun < LATE:
                step_optimizer(u, scale)

        return lazy

    _instead(scheme, "step_optimizer", make)


@fault("local-norm", "learning", "divisor or scale", clip_norm=0.01)
def local_norm(scheme: Any) -> None:
    """Each rank clips by the norm of its own shard alone."""

    def make(update: Callable) -> Callable:
        def alone(scale: float) -> None:
            scheme.grad_norm = float(np.sqrt(scheme.squares())) / scheme.scale.value
            # A rank may own nothing.
            update(min(1.0, scheme.training.clip_norm / (scheme.grad_norm or 1.0)) / scheme.scale.value)

        return alone

    _instead(scheme, "update", make)


# Memory.


@fault("never-free", "memory", schemes=("zero3",))
def never_free(scheme: Any) -> None:
    """A gathered unit is not freed after its use."""
    scheme.free_gathered = lambda u: None


@fault("keep-full-gradient", "memory", schemes=("zero2", "zero3"))
def keep_full_gradient(scheme: Any) -> None:
    """Full gradients are kept after they were reduced."""
    kept: dict[int, np.ndarray] = {}
    _reduced_by(scheme, lambda u, x: kept.update({u: x}))


@fault("hidden-copy", "audit", audit_memory=True)
def hidden_copy(scheme: Any) -> None:
    """A full copy of the parameters is kept, which the ledger does not know."""

    def make(update: Callable) -> Callable:
        def hiding(scale: float) -> None:
            update(scale)
            scheme.hidden = np.zeros(scheme.model.n_params, np.float32)

        return hiding

    _instead(scheme, "update", make)


# Messages.


@fault("send-twice", "traffic")
def send_twice(scheme: Any) -> None:
    """Every message is sent twice."""

    def make(sendrecv: Callable) -> Callable:
        def twice(*message: Any) -> None:
            sendrecv(*message)
            sendrecv(*message)

        return twice

    _instead(scheme.comm, "sendrecv", make)


@fault("half-in-16-bits", "learning", "dtype on the wire")
def half_in_16_bits(scheme: Any) -> None:
    """Half of the elements of a partial sum travel rounded to float16."""
    comm = scheme.comm

    def make(sendrecv: Callable) -> Callable:
        def rounding(send: np.ndarray, dest: int | None, receive: np.ndarray, source: int | None) -> None:
            if comm._now.name == "reduce-scatter":
                send = send.copy()
                half = send[: send.size // 2]
                half[...] = half.astype(np.float16)
            sendrecv(send, dest, receive, source)

        return rounding

    _instead(comm, "sendrecv", make)


@fault("unit-order", "order", least_units=2)
def unit_order(scheme: Any) -> None:
    """Rank 1 hands its units to reduction in the opposite order."""
    if scheme.comm.rank != CULPRIT:
        return
    late: list[int] = []

    def at_the_end(backward_done: Callable) -> Callable:
        return lambda units: backward_done(list(reversed(units)))

    def one_later(grad_ready: Callable) -> Callable:
        def swapped(u: int) -> None:
            if u == len(scheme.units) - 1:
                late.append(u)
                return
            grad_ready(u)
            while late:
                grad_ready(late.pop())

        return swapped

    if scheme.reduce_every == "step":
        _instead(scheme, "backward_done", at_the_end)
    else:
        _instead(scheme, "grad_ready", one_later)


# Data, weights, numbers.


@fault("same-batch", "reference", "different data", on="data")
def same_batch(data: Data, rank: int) -> Data:
    """Rank 1 trains on rank 0's batches."""
    return _SameBatch(data) if rank == CULPRIT else data


class _SameBatch:
    def __init__(self, data: Data) -> None:
        self._data = data

    def fingerprint(self) -> str:
        return self._data.fingerprint()

    def global_batches(self, size: int) -> Iterator[Sequence[MicroBatches]]:
        for batches in self._data.global_batches(size):
            yield [batches[0 if rank == CULPRIT else rank] for rank in range(size)]


@fault("rank-dependent-weights", "set-up", "different initial weights", on="model")
def rank_dependent_weights(model: Model, rank: int) -> Model:
    """Rank 1 starts from other weights."""
    return _OtherWeights(model) if rank == CULPRIT else model


class _OtherWeights:
    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def init(self, seed: int = 0) -> Iterator[np.ndarray]:
        return self._model.init(seed + 1)


@fault("nan", "non-finite", "non-finite", least_steps=LATE, least_units=2)
def nan(scheme: Any) -> None:
    """Rank 1's gradient of unit 1 has a NaN in step 3."""

    def make(take: Callable) -> Callable:
        def spoiled(u: int) -> None:
            if scheme.comm.rank == CULPRIT and scheme.steps_begun == LATE and u == 1:
                scheme._local_gradients.get(u, scheme.grads[u])[0] = np.nan
            take(u)

        return spoiled

    _instead(scheme, "grad_ready", make)
