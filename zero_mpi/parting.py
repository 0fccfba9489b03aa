"""Parting: where a scheme first leaves the reference, by how much, and why, by evidence of the reference.

Not for: noticing that something parted (run.py), or printing it (report.py).

Each class of cause is a test that either reproduces the scheme's bits, or fits its numbers with an error no
larger than rounding. What no test explains is "unknown".
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .comm import Communicator
from .precision import dtype_of
from .reference import ORDERS, Reference, in_turn
from .schemes import Scheme

CLASSES = (
    "different data",
    "non-finite",
    "summation order",
    "order of accumulation",
    "dtype on the wire",
    "wrong block",
    "stale",
    "divisor or scale",
    "missing contribution",
    "doubled contribution",
    "unknown",
)


class Parting(NamedTuple):
    """The first element that parts, and the cause.

    Fields
    ------
    phase : "gradient", "parameters" or "replica" (a copy of others' parameters that a rank holds whole).
    unit, tensor, place : where; the place is the index in the tensor. rank : its owner, or who holds the
        replica.
    observed, expected : the two values, and their bits in `dtype`, hexadecimal. ulp : how many steps from
        value to value lead from one to the other.
    differing, numel : how many elements of the unit differ, and how many it has.
    cause, why : the class, one of `CLASSES`, and the evidence in words.
    """

    step: int
    phase: str
    unit: int
    tensor: str
    place: tuple[int, ...]
    rank: int
    dtype: str
    observed: float
    expected: float
    observed_bits: str
    expected_bits: str
    ulp: int
    differing: int
    numel: int
    cause: str
    why: str


class Observed(NamedTuple):
    """What a scheme's ranks hold after a step, gathered on rank 0.

    Fields
    ------
    gradients : unit -> float32, (numel,), of the units that are trained. theta : float32, one for each unit.
    replicas : one for each rank: the units it holds whole, in the parameters' dtype, or None.
    norms : of each rank. other_data : ranks that did not train on the batch that the reference drew for them.
    """

    gradients: dict[int, np.ndarray]
    theta: list[np.ndarray]
    replicas: list[list[np.ndarray] | None]
    norms: list[float | None]
    other_data: list[int]


def observe(scheme: Scheme, other_data: Sequence[int]) -> Observed | None:
    """Gather what the ranks hold on rank 0; None on the others. Collective; costs N models of traffic.

    It is control traffic, and asked for once a run, when something parted.
    """
    comm = scheme.comm
    gradients, theta = {}, []
    for u in scheme.units:
        arrays = {name: array for name, _, _, array in scheme.owned(u)}
        theta.append(_gathered(comm, scheme.owned_theta(u), scheme.blocks[u].numel))
        if "grads" in arrays:
            gradients[u] = _gathered(comm, arrays["grads"], scheme.blocks[u].numel)
    replicas: list[Any] = [None] * comm.size
    if scheme.replica(0) is not None:
        whole = [scheme.replica(u) for u in scheme.units]
        for mine in whole:
            if mine is None:
                continue
            boxes = [np.empty_like(mine) for _ in range(comm.size)] if comm.rank == 0 else None
            comm.gather_to_root(mine, boxes)
            for rank, box in enumerate(boxes or ()):
                replicas[rank] = [*(replicas[rank] or ()), box]
    norms = comm.allgather_object(scheme.grad_norm)
    return Observed(gradients, theta, replicas, norms, list(other_data)) if comm.rank == 0 else None


def _gathered(comm: Communicator, block: np.ndarray, numel: int) -> np.ndarray:
    """Return all ranks' blocks of a unit on rank 0, float32, (numel,); something of no use on the others."""
    mine = block.astype(np.float32)
    if comm.rank != 0:
        comm.gather_to_root(mine, None)
        return mine
    whole = np.empty(numel, np.float32)
    comm.gather_to_root(mine, np.array_split(whole, comm.size))
    return whole


def find(step: int, seen: Observed, reference: Reference) -> Parting | None:
    """Return where `seen` first parts from what the reference has after `step`; None if nowhere. Local."""
    finder = _Finder(step, seen, reference)
    return finder.gradient() or finder.parameters() or finder.replica()


class _Finder:
    def __init__(self, step: int, seen: Observed, reference: Reference) -> None:
        self.step, self.seen, self.reference = step, seen, reference
        self.model, self.size = reference.model, reference.size
        self.theta = reference._split(reference.theta)
        self.theta_before = reference._split(reference.before[0])

    # Where.

    def gradient(self) -> Parting | None:
        for u in sorted(self.seen.gradients):
            observed, expected = self.seen.gradients[u], self.reference.means[u]
            if not _same(observed, expected):
                cause, why = self._first(self._causes_of_gradient(u, observed, expected))
                return self._parting("gradient", u, observed, expected, cause, why, self._stored_grads)
        return None

    def parameters(self) -> Parting | None:
        for u, (observed, expected) in enumerate(zip(self.seen.theta, self.theta, strict=True)):
            if not _same(observed, expected):
                cause, why = self._first(self._causes_of_parameters(u, observed, expected))
                return self._parting("parameters", u, observed, expected, cause, why, "float32")
        return None

    def replica(self) -> Parting | None:
        stored = dtype_of(self.reference.precision.params)
        for rank, units in enumerate(self.seen.replicas):
            for u, replica in enumerate(units or ()):
                observed = replica.astype(np.float32)
                expected = self.theta[u].astype(stored).astype(np.float32)
                if _same(observed, expected):
                    continue
                before = self.theta_before[u].astype(stored).astype(np.float32)
                cause, why = self._first(self._causes_of_replica(rank, observed, expected, before))
                name = self.reference.precision.params
                return self._parting("replica", u, observed, expected, cause, why, name, rank)
        return None

    def _parting(
        self,
        phase: str,
        u: int,
        observed: np.ndarray,
        expected: np.ndarray,
        cause: str,
        why: str,
        dtype: str,
        rank: int | None = None,
    ) -> Parting:
        apart = _differing(observed, expected)
        first = int(apart[0])
        tensor, index = self._tensor(u, first)
        return Parting(
            self.step,
            phase,
            u,
            tensor,
            index,
            self._owner(u, first) if rank is None else rank,
            dtype,
            float(observed[first]),
            float(expected[first]),
            _bits(observed[first : first + 1], dtype),
            _bits(expected[first : first + 1], dtype),
            ulp_distance(observed[first : first + 1], expected[first : first + 1], dtype),
            apart.size,
            observed.size,
            cause,
            why,
        )

    def _tensor(self, u: int, place: int) -> tuple[str, tuple[int, ...]]:
        for name, shape in self.model.tensors(u):
            numel = int(np.prod(shape))
            if place < numel:
                return name, tuple(int(i) for i in np.unravel_index(place, shape))
            place -= numel
        return "beyond the unit's tensors", (place,)

    def _owner(self, u: int, place: int) -> int:
        edges = np.cumsum([part.size for part in self._blocks(np.arange(self.model.units[u]))])
        return int(np.searchsorted(edges, place, side="right"))

    def _blocks(self, unit: np.ndarray) -> list[np.ndarray]:
        return np.array_split(unit, self.size)

    @property
    def _stored_grads(self) -> str:
        return self.reference.precision.grads

    # Why: each yields (class, words) if its evidence holds; the first that holds is the cause.

    @staticmethod
    def _first(causes: Iterator[tuple[str, str]]) -> tuple[str, str]:
        return next(causes, ("unknown", "no single cause that is known gives these numbers"))

    def _causes_of_gradient(
        self, u: int, observed: np.ndarray, expected: np.ndarray
    ) -> Iterator[tuple[str, str]]:
        yield from self._other_data()
        yield from _not_finite(observed, expected)
        for name, order in self._orders():
            if _same(observed, self.reference.mean_if(u, order=order)):
                yield "summation order", f"summing the ranks in the order of {name} gives these bits"
        for every in ("step", "micro-batch"):
            if _same(observed, self.reference.mean_if(u, reduce_every=every)):
                yield "order of accumulation", f"reducing once every {every} gives these bits"
        yield from self._other_wire(u, observed, expected)
        yield from self._moved(observed, expected, "gradient")
        before = self.reference.means_before.get(u)
        if before is not None and _all_of(observed, expected, before):
            yield "stale", "where it differs it equals the gradient of the step before"
        yield from self._other_sum(u, observed, expected)

    def _causes_of_parameters(
        self, u: int, observed: np.ndarray, expected: np.ndarray
    ) -> Iterator[tuple[str, str]]:
        yield from self._other_data()
        yield from _not_finite(observed, expected)
        if _all_of(observed, expected, self.theta_before[u]):
            yield "stale", "where they differ they equal the parameters before this step's update"
        yield from self._other_scale(u, observed, expected)
        gradient = self.reference.means.get(u)
        if gradient is not None:
            for shift in (-1, 1):
                blocks = self._blocks(gradient)
                moved = [
                    np.resize(blocks[(b + shift) % self.size], block.size) for b, block in enumerate(blocks)
                ]
                if _all_of(observed, expected, self._updated(u, np.concatenate(moved), self._scale())):
                    side = "right" if shift > 0 else "left"
                    yield (
                        "wrong block",
                        f"an update with the {side} neighbour's block of the gradient gives them",
                    )
        yield from self._moved(observed, expected, "parameters")

    def _causes_of_replica(
        self, rank: int, observed: np.ndarray, expected: np.ndarray, before: np.ndarray
    ) -> Iterator[tuple[str, str]]:
        yield from _not_finite(observed, expected)
        if _all_of(observed, expected, before):
            yield "stale", f"rank {rank} still holds others' parameters from before the update"
        yield from self._moved(observed, expected, "parameters")

    def _other_data(self) -> Iterator[tuple[str, str]]:
        if self.seen.other_data:
            ranks = ", ".join(map(str, self.seen.other_data))
            yield "different data", f"rank {ranks} did not train on the batch that is its own"

    def _orders(self) -> Iterator[tuple[str, Callable[[int, int], Any]]]:
        yield from ORDERS.items()
        for late in range(1, self.size):
            yield f"a ring rotated by {late}", partial(_rotated, late)

    def _other_wire(self, u: int, observed: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, str]]:
        for name in ("float16", "bfloat16"):
            try:
                wire = dtype_of(name)
            except ValueError:
                # bfloat16 is an extra.
                continue
            sent = self.reference.mean_if(u, sent_as=partial(_through, wire))
            if _all_of(observed, expected, sent):
                share = _differing(observed, expected).size / observed.size
                yield (
                    "dtype on the wire",
                    f"partial sums rounded to {name} on their way give these bits ({share:.0%} of elements)",
                )

    def _moved(self, observed: np.ndarray, expected: np.ndarray, what: str) -> Iterator[tuple[str, str]]:
        """Look for a block that equals a neighbour's, or its own moved by one element."""
        b = self._block_of_first(observed, expected)
        mine, edges = self._blocks(observed)[b], np.cumsum([0, *(x.size for x in self._blocks(observed))])
        low, high = int(edges[b]), int(edges[b + 1])
        if len(np.unique(mine)) < 3:
            return
        for shift in (-1, 1):
            # Within the block: what comes from across its edge was summed in another order.
            inner = slice(max(0, -shift), mine.size - max(0, shift))
            moved = slice(low + max(0, shift), high - max(0, -shift))
            if _same(mine[inner], expected[moved]):
                yield "wrong block", f"block {b} of the {what} equals that moved by {shift:+d} element"
            other = self._blocks(expected)[(b + shift) % self.size]
            common = min(other.size, mine.size)
            if self.size > 1 and _same(mine[:common], other[:common]):
                yield "wrong block", f"block {b} of the {what} equals block {(b + shift) % self.size}"

    def _block_of_first(self, observed: np.ndarray, expected: np.ndarray) -> int:
        first = int(_differing(observed, expected)[0])
        edges = np.cumsum([part.size for part in self._blocks(observed)])
        return int(np.searchsorted(edges, first, side="right"))

    def _other_sum(self, u: int, observed: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, str]]:
        """Fit the block that parts by the local gradients: their weights say what was summed."""
        turns = self.reference.locals
        named = [(k, rank) for k in range(len(turns)) for rank in range(self.size)]
        b = self._block_of_first(observed, expected)
        columns = np.stack(
            [self._blocks(turns[k][rank][u].astype(np.float64))[b] for k, rank in named], axis=1
        )
        target = self._blocks(observed)[b].astype(np.float64) * len(named)
        scale = float(np.abs(columns).max(initial=0.0))
        if len(target) <= len(named) or scale == 0 or not np.isfinite(target).all():
            return
        weights, _, rank_of, _ = np.linalg.lstsq(columns, target, rcond=1e-9)
        if rank_of < len(named):
            return
        error = float(np.abs(columns @ weights - target).max())
        # Rounding of the sums, and of the mean to its storage dtype.
        eps = float(np.finfo(np.float32).eps) * len(named) ** 2
        if self._stored_grads != "float32":
            eps += {"float16": 2.0**-11, "bfloat16": 2.0**-8}[self._stored_grads] * len(named)
        if error > 4 * eps * max(1.0, float(np.abs(weights).max())) * scale:
            return
        yield from _explained(weights, named, len(turns) > 1)

    def _scale(self) -> float:
        """Return the factor that the reference updated with."""
        limit, norm = self.reference.training.clip_norm, self.reference.norm
        scale = 1.0 / self.reference.scale
        return scale * limit / norm if limit is not None and norm is not None and norm > limit else scale

    def _other_scale(self, u: int, observed: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, str]]:
        gradient = self.reference.means.get(u)
        limit, norm = self.reference.training.clip_norm, self.reference.norm
        if gradient is None:
            return
        for rank, other in enumerate(self.seen.norms):
            if limit is None or other is None or other == norm:
                continue
            scale = min(1.0, limit / other) / self.reference.scale
            blocks = [np.zeros(0)] * self.size
            blocks[rank] = self._blocks(self._updated(u, gradient, scale))[rank]
            if _same(self._blocks(observed)[rank], blocks[rank]):
                yield (
                    "divisor or scale",
                    f"rank {rank} scaled its update for a norm of {other:.6g}; all together have {norm:.6g}",
                )
        for name, factor in (("N", self.size), ("K", len(self.reference.locals))):
            for text, value in ((name, float(factor)), (f"1/{name}", 1.0 / factor)):
                if factor > 1 and _all_of(
                    observed, expected, self._updated(u, gradient, self._scale() * value)
                ):
                    yield "divisor or scale", f"an update scaled by {text} gives these bits"

    def _updated(self, u: int, gradient: np.ndarray, scale: float) -> np.ndarray:
        theta = self.reference.updated({**self.reference.means, u: gradient}, scale)
        return self.reference._split(theta)[u]


def _rotated(late: int, b: int, size: int) -> Any:
    """Return the order of a ring that starts each block `late` ranks late."""
    return in_turn([(b + 1 + late + i) % size for i in range(size)])


def _through(wire: np.dtype, partial_sum: np.ndarray) -> np.ndarray:
    return partial_sum.astype(wire).astype(partial_sum.dtype)


def _explained(
    weights: np.ndarray, named: Sequence[tuple[int, int]], several: bool
) -> Iterator[tuple[str, str]]:
    """Say what weights that are not all 1 mean: a term missing, a term twice, or all times a factor."""

    def names(chosen: np.ndarray) -> str:
        words = [
            f"rank {rank}" + (f", micro-batch {k}" if several else "") for k, rank in np.array(named)[chosen]
        ]
        return "; ".join(words)

    zero = np.abs(weights) < 0.02
    factor = float(np.median(weights[~zero])) if not zero.all() else 0.0
    alike = np.abs(weights - factor) < 0.02 * max(abs(factor), 1e-9)
    twice = np.abs(weights - 2.0) < 0.04
    if zero.any() and (zero | alike).all():
        yield "missing contribution", f"it is the sum without {names(zero)}"
    elif not zero.any() and alike.all() and abs(factor - 1.0) > 0.001:
        yield "divisor or scale", f"it is the mean times {factor:.6g}, on every term"
    elif twice.any() and (twice | (np.abs(weights - 1.0) < 0.02)).all():
        yield "doubled contribution", f"it is the sum with {names(twice)} twice"


def _not_finite(observed: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, str]]:
    bad = ~np.isfinite(observed) & np.isfinite(expected)
    if bad.any():
        yield "non-finite", f"{int(bad.sum())} elements are NaN or infinite where they should not be"


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.size > 0 and not _differing(a, b).size


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the places where two float32 arrays differ in a bit."""
    return np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))


def _all_of(observed: np.ndarray, expected: np.ndarray, other: np.ndarray) -> bool:
    """Return whether each element that is not the expected one is the other one, which explains them all."""
    apart = _differing(observed, expected)
    return not _differing(observed[apart], np.ascontiguousarray(other[apart])).size


def _bits(x: np.ndarray, dtype: str) -> str:
    """Return the bits of one float32 number, shape (1,), as `dtype` stores it."""
    stored = x.astype(dtype_of(dtype))
    return f"0x{int(stored.view(np.dtype(f'u{stored.itemsize}'))[0]):0{2 * stored.itemsize}x}"


def ulp_distance(a: np.ndarray, b: np.ndarray, dtype: str) -> int:
    """Return how many steps from value to value of `dtype` lead from `a` to `b`, shape (1,)."""
    kind = dtype_of(dtype)
    word = np.dtype(f"i{kind.itemsize}")
    ordered = []
    for x in (a, b):
        bits = int(x.astype(kind).view(word)[0])
        # Of negative numbers the bits count down from the sign bit.
        ordered.append(bits if bits >= 0 else -(bits & (2 ** (8 * kind.itemsize - 1) - 1)))
    return abs(ordered[0] - ordered[1])
