"""Parting: where a scheme first leaves the reference, by how much, and why, by evidence of the reference.

Not for: noticing that something parted (run.py), or printing it (report.py).

Each class of cause is a test that either reproduces the scheme's bits in every block that parts, or fits its
numbers there with an error no larger than rounding. What no test explains is "unknown".
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from .comm import Communicator
from .precision import WIRE_DTYPES, dtype_of
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

# Half the distance from 1 to the next number: what one rounding changes at most, relative.
_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# Half the distance between float16's smallest numbers: what one rounding changes at most, absolute.
_SMALLEST = 2.0**-25

# So many elements of another wire's rounding are no accident: one of them alone is, once in a few tries.
_ENOUGH = 8


class Parting(NamedTuple):
    """The first element that parts, and the cause.

    Fields
    ------
    phase : "gradient", "parameters", "replica" (parameters, others' among them, that a rank holds whole) or
        "optimizer" (its state, where it alone parts).
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
    stored : the same in the parameters' dtype, which is theta itself without a master.
    state : one for each unit: slot -> float32, (numel,).
    replicas : one for each rank: the units it holds whole, in the parameters' dtype, or None.
    norms : of each rank. other_data : ranks that did not train on the batch that the reference drew for them.
    """

    gradients: dict[int, np.ndarray]
    theta: list[np.ndarray]
    stored: list[np.ndarray]
    state: list[dict[str, np.ndarray]]
    replicas: list[list[np.ndarray] | None]
    norms: list[float | None]
    other_data: list[int]


def observe(scheme: Scheme, other_data: Sequence[int]) -> Observed | None:
    """Gather what the ranks hold on rank 0; None on the others. Collective; costs N models of traffic.

    It is control traffic, and asked for once a run, when something parted.
    """
    comm = scheme.comm
    gradients, theta, stored, state = {}, [], [], []
    for u in scheme.units:
        numel = scheme.blocks[u].numel
        theta.append(gathered(comm, scheme.owned_theta(u), numel))
        arrays = {name: gathered(comm, array, numel) for name, _, _, array in scheme.owned(u)}
        arrays.pop("master", None)
        stored.append(arrays.pop("params"))
        if "grads" in arrays:
            gradients[u] = arrays.pop("grads")
        state.append(arrays)
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
    if comm.rank != 0:
        return None
    return Observed(gradients, theta, stored, state, replicas, norms, list(other_data))


def gathered(comm: Communicator, block: np.ndarray, numel: int) -> np.ndarray:
    """Return all ranks' blocks of a unit on rank 0, float32, (numel,); something of no use on the others."""
    mine = block.astype(np.float32)
    if comm.rank != 0:
        comm.gather_to_root(mine, None)
        return mine
    whole = np.empty(numel, np.float32)
    comm.gather_to_root(mine, np.array_split(whole, comm.size))
    return whole


def find(step: int, seen: Observed, reference: Reference, terms: int = 0) -> Parting | None:
    """Return where `seen` first parts from what the reference has after `step`; None if nowhere. Local.

    terms : of a sum in the model, if another library than numpy computed the gradients seen: as many
        roundings more are allowed for where weights are fitted.
    """
    finder = _Finder(step, seen, reference, terms)
    return finder.gradient() or finder.parameters() or finder.replica() or finder.optimizer()


class _Finder:
    def __init__(self, step: int, seen: Observed, reference: Reference, terms: int) -> None:
        self.step, self.seen, self.reference, self.terms = step, seen, reference, terms
        self.model, self.size = reference.model, reference.size
        self.theta = reference.split(reference.theta)
        self.theta_before = reference.split(reference.before[0])
        stored = reference.precision.params
        self.stored = [_through(dtype_of(stored), unit) for unit in self.theta]
        self.stored_before = [_through(dtype_of(stored), unit) for unit in self.theta_before]

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
        for u, (observed, expected) in enumerate(zip(self.seen.stored, self.stored, strict=True)):
            if not _same(observed, expected):
                causes = self._causes_of_copy("their owner", observed, expected, self.stored_before[u])
                name = self.reference.precision.params
                return self._parting("parameters", u, observed, expected, *self._first(causes), name)
        return None

    def replica(self) -> Parting | None:
        for rank, units in enumerate(self.seen.replicas):
            for u, replica in enumerate(units or ()):
                observed, expected = replica.astype(np.float32), self.stored[u]
                if not _same(observed, expected):
                    causes = self._causes_of_copy(f"rank {rank}", observed, expected, self.stored_before[u])
                    name = self.reference.precision.params
                    return self._parting("replica", u, observed, expected, *self._first(causes), name, rank)
        return None

    def optimizer(self) -> Parting | None:
        for slot, whole in self.reference.state.items():
            before = self.reference.split(self.reference.before[1][slot])
            for u, expected in enumerate(self.reference.split(whole)):
                observed = self.seen.state[u].get(slot, expected)
                if not _same(observed, expected):
                    causes = self._causes_of_copy(f"the owner of {slot}", observed, expected, before[u])
                    return self._parting("optimizer", u, observed, expected, *self._first(causes), "float32")
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
            self._owner_of(observed.size, first) if rank is None else rank,
            dtype,
            float(observed[first]),
            float(expected[first]),
            _bits(observed[first : first + 1], dtype),
            _bits(expected[first : first + 1], dtype),
            int(ulp_distances(observed[first : first + 1], expected[first : first + 1], dtype)[0]),
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

    def _owner_of(self, numel: int, place: int) -> int:
        edges = np.cumsum([part.size for part in self._blocks(np.empty(numel))])
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
        again = [
            partial(self.reference.mean_if, u, changed=partial(self._displaced, d)) for d in self._others
        ]
        yield from self._moved(observed, expected, "gradient", again)
        before = self.reference.means_before.get(u)
        # Zeros are also what never came.
        if before is not None and self._equals(observed, expected, before) and observed.any():
            yield "stale", "where it parts it equals the gradient of the step before"
        yield from self._other_sum(u, observed, expected)

    def _causes_of_parameters(
        self, u: int, observed: np.ndarray, expected: np.ndarray
    ) -> Iterator[tuple[str, str]]:
        yield from self._other_data()
        yield from _not_finite(observed, expected)
        if self._equals(observed, expected, self.theta_before[u]):
            yield "stale", "where they part they equal the parameters before this step's update"
        yield from self._other_scale(u, observed, expected)
        gradient = self.reference.means.get(u)
        if gradient is not None:
            for d in self._others:
                moved = self._updated(u, self._displaced(d, gradient), self._scale())
                if self._equals(observed, expected, moved):
                    b = self._first_parted(observed, expected)
                    other = f"block {(b + d) % self.size} of the gradient"
                    yield "wrong block", f"an update of block {b} with {other} gives them"
        yield from self._moved(observed, expected, "parameters")

    def _causes_of_copy(
        self, whose: str, observed: np.ndarray, expected: np.ndarray, before: np.ndarray
    ) -> Iterator[tuple[str, str]]:
        yield from _not_finite(observed, expected)
        if self._equals(observed, expected, before):
            yield "stale", f"{whose} still holds what was there before the update"
        yield from self._moved(observed, expected, "copy")

    def _other_data(self) -> Iterator[tuple[str, str]]:
        if self.seen.other_data:
            ranks = ", ".join(map(str, self.seen.other_data))
            yield "different data", f"rank {ranks} did not train on the batch that is its own"

    def _orders(self) -> Iterator[tuple[str, Callable[[int, int], Any]]]:
        yield from ORDERS.items()
        for late in range(1, self.size):
            yield f"a ring rotated by {late}", partial(_rotated, late)

    def _other_wire(self, u: int, observed: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, str]]:
        apart = _differing(observed, expected).size
        for name in WIRE_DTYPES:
            try:
                wire = dtype_of(name)
                sums = self.reference.mean_if(u, reduce=name)
            except ValueError:
                # bfloat16 is an extra, and float16 is too narrow for its gradients.
                continue
            share = f"({apart / observed.size:.0%} of elements)"
            if _same(observed, sums):
                yield "dtype on the wire", f"summing in {name} gives these bits {share}"
            sent = self.reference.mean_if(u, sent_as=partial(_through, wire))
            # Some that a narrower wire rounds alike are found by accident, where one step apart is near.
            if _all_of(observed, expected, sent) and apart >= min(_ENOUGH, _differing(sent, expected).size):
                yield (
                    "dtype on the wire",
                    f"partial sums rounded to {name} on their way give these bits {share}",
                )

    @property
    def _others(self) -> range:
        """Return the distances from a block to the others."""
        return range(1, self.size)

    def _displaced(self, d: int, unit: np.ndarray) -> np.ndarray:
        """Return `unit` with the d-th next block in the place of each, cut or repeated to its size."""
        blocks = self._blocks(unit)
        moved = [np.resize(blocks[(b + d) % self.size], block.size) for b, block in enumerate(blocks)]
        return np.concatenate(moved)

    def _moved(
        self,
        observed: np.ndarray,
        expected: np.ndarray,
        what: str,
        again: Sequence[Callable[[], np.ndarray]] = (),
    ) -> Iterator[tuple[str, str]]:
        """Look for blocks that each equal another, or their own moved by one element.

        again : for each distance to another block, what summing that block in the order of this one gives.
        """
        moved = [(f"itself moved by {d:+d} element", 0, np.roll(expected, -d)) for d in (-1, 1)]
        for d in self._others:
            others = [self._displaced(d, expected), *(make() for make in again[d - 1 : d])]
            moved += [("block {}", d, other) for other in others]
        candidates = [(text, d, self._blocks(other)) for text, d, other in moved]
        said, told = "", False
        for b, (mine, right) in enumerate(zip(self._blocks(observed), self._blocks(expected), strict=True)):
            if not _differing(mine, right).size:
                continue
            for text, d, blocks in candidates:
                # What comes from across the edge of a block was summed in another order, or is of no block.
                size = self._blocks(expected)[(b + d) % self.size].size if d else mine.size
                common = slice(1, mine.size - 1) if not d else slice(0, min(mine.size, size))
                if _same(mine[common], blocks[b][common]):
                    said = said or f"block {b} of the {what} equals {text.format((b + d) % self.size)}"
                    # Of equal numbers any move looks the same.
                    told = told or len(np.unique(mine[common])) > 2
                    break
            else:
                return
        if told:
            yield "wrong block", said

    def _first_parted(self, observed: np.ndarray, expected: np.ndarray) -> int:
        """Return the number of the first block that parts."""
        return self._owner_of(observed.size, int(_differing(observed, expected)[0]))

    def _equals(self, observed: np.ndarray, expected: np.ndarray, other: np.ndarray) -> bool:
        """Return whether each block that parts is `other` from its first to its last element that parts."""
        for mine, right, others in zip(*map(self._blocks, (observed, expected, other)), strict=True):
            apart = _differing(mine, right)
            if apart.size:
                run = slice(int(apart[0]), int(apart[-1]) + 1)
                if not _same(mine[run], others[run]):
                    return False
        return True

    def _other_sum(self, u: int, observed: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, str]]:
        """Fit what parts by the local gradients: their weights say what was summed.

        First in all blocks that part, then in the first alone: a mistake may differ from block to block.
        """
        turns = self.reference.locals
        named = [(k, rank) for k in range(len(turns)) for rank in range(self.size)]
        every = [self._blocks(turns[k][rank][u].astype(np.float64)) for k, rank in named]
        pairs = zip(self._blocks(observed), self._blocks(expected), strict=True)
        parted = [b for b, (mine, right) in enumerate(pairs) if _differing(mine, right).size]
        for chosen in (parted, parted[:1]):
            columns = np.stack([np.concatenate([blocks[b] for b in chosen]) for blocks in every], axis=1)
            mine = np.concatenate([self._blocks(observed)[b] for b in chosen]).astype(np.float64)
            if np.isfinite(mine).all() and np.isfinite(columns).all():
                yield from _explained(columns, mine * len(named), named, self._rounding())

    def _rounding(self) -> tuple[float, float]:
        """Return how far rounding moves a sum of local gradients at most: relative to the sum of their
        magnitudes, and absolute."""
        precision, micro_batches = self.reference.precision, len(self.reference.locals)
        terms = self.size * micro_batches
        at_rest, on_wire = (_ROUNDING[name] for name in (precision.grads, precision.reduce))
        # A float32 mean at least is made of every sum; with room for as many roundings again.
        relative = 2 * (at_rest * (micro_batches + 1) + (on_wire + _ROUNDING["float32"]) * terms)
        relative += 2 * _ROUNDING["float32"] * self.terms
        narrow = "float16" in (precision.grads, precision.reduce)
        return relative, 2 * _SMALLEST * terms * (terms + 1) if narrow else 0.0

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
        factors = {"N": float(self.size), "K": float(len(self.reference.locals))}
        factors["the loss scale"] = self.reference.scale
        factors["norm / clip norm"] = norm / limit if limit and norm and norm > limit else 1.0
        for name, factor in factors.items():
            for text, value in ((name, factor), (f"1 / ({name})", 1.0 / factor)):
                updated = self._updated(u, gradient, self._scale() * value)
                if factor != 1.0 and self._equals(observed, expected, updated):
                    yield "divisor or scale", f"an update scaled by {text} gives these bits"

    def _updated(self, u: int, gradient: np.ndarray, scale: float) -> np.ndarray:
        theta = self.reference.updated({**self.reference.means, u: gradient}, scale)
        return self.reference.split(theta)[u]


def _rotated(late: int, b: int, size: int) -> Any:
    """Return the order of a ring that starts each block `late` ranks late."""
    return in_turn([(b + 1 + late + i) % size for i in range(size)])


def _through(wire: np.dtype, partial_sum: np.ndarray) -> np.ndarray:
    return partial_sum.astype(wire).astype(partial_sum.dtype)


def _explained(
    columns: np.ndarray,
    target: np.ndarray,
    named: Sequence[tuple[int, int]],
    rounding: tuple[float, float],
) -> Iterator[tuple[str, str]]:
    """Say which weights of local gradients give a sum: one is 0, one is 2, or all are alike.

    Parameters
    ----------
    columns : float64, (n, terms), the local gradients. target : float64, (n,), the sum that was seen.
    named : the micro-batch and the rank of each column. rounding : relative and absolute, of a sum.
    """
    terms = len(named)
    several = any(k for k, _ in named)

    def fits(weights: np.ndarray) -> bool:
        relative, absolute = rounding
        most = np.abs(columns) @ np.abs(weights) * relative + absolute
        return bool((np.abs(columns @ weights - target) <= most).all())

    def names(chosen: np.ndarray) -> str:
        words = [f"rank {rank}" + (f", micro-batch {k}" if several else "") for k, rank in named]
        return "; ".join(word for word, is_chosen in zip(words, chosen, strict=True) if is_chosen)

    ones = np.ones(terms)
    if not columns.any() or fits(ones):
        yield "unknown", "within rounding it is the sum of the same terms; no known order or wire rounds so"
        return
    together = columns.sum(axis=1)
    factor = float(together @ target / (together @ together)) if together.any() else 0.0
    weights, _, rank_of, _ = np.linalg.lstsq(columns, target, rcond=1e-9)
    if factor and fits(factor * ones):
        one = np.eye(terms)
        others = [
            *(ones - one),
            *(terms / max(1, terms - 1) * (ones - one)),
            *one,
            *(terms * one),
            *(ones + one),
        ]
        if rank_of < terms and any(map(fits, others)):
            yield (
                "unknown",
                "terms are multiples of each other here: a factor, or one left out or counted twice",
            )
        else:
            yield "divisor or scale", f"it is the mean times {factor:.6g}, on every term"
    if rank_of < terms:
        return
    missing, twice = np.abs(weights) < 0.25, weights > 1.5
    if missing.any():
        # The mean over all, or over those that are there.
        for divisor in (terms, max(1, terms - int(missing.sum()))):
            if fits(np.where(missing, 0.0, terms / divisor)):
                of = "" if divisor == terms else f", divided by {divisor} instead of {terms}"
                yield "missing contribution", f"it is the sum without {names(missing)}{of}"
    if twice.any() and fits(np.where(twice, 2.0, 1.0)):
        yield "doubled contribution", f"it is the sum with {names(twice)} twice"


def _not_finite(observed: np.ndarray, expected: np.ndarray) -> Iterator[tuple[str, str]]:
    bad = ~np.isfinite(observed) & np.isfinite(expected)
    if bad.any():
        are = "1 element is" if bad.sum() == 1 else f"{int(bad.sum())} elements are"
        yield "non-finite", f"{are} NaN or infinite where a finite number is due"


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return not _differing(a, b).size


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the places where two float32 arrays differ in a bit, but for NaNs, of which any is any."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return np.flatnonzero((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b)))


def _all_of(observed: np.ndarray, expected: np.ndarray, other: np.ndarray) -> bool:
    """Return whether each element that is not the expected one is the other one, which explains them all."""
    apart = _differing(observed, expected)
    return _same(observed[apart], other[apart])


def _bits(x: np.ndarray, dtype: str) -> str:
    """Return the bits of one float32 number, shape (1,), as `dtype` stores it."""
    stored = x.astype(dtype_of(dtype))
    return f"0x{int(stored.view(np.dtype(f'u{stored.itemsize}'))[0]):0{2 * stored.itemsize}x}"


def ulp_distances(a: np.ndarray, b: np.ndarray, dtype: str = "float32") -> np.ndarray:
    """Return how many steps from value to value of `dtype` lead from each of `a` to that of `b`.

    Parameters
    ----------
    a, b : float32, shape (n,); numbers of `dtype`. +0 and -0 are no step apart.
    """
    kind = dtype_of(dtype)
    word, ordered = np.dtype(f"i{kind.itemsize}"), []
    for x in (a, b):
        bits = x.astype(kind).view(word).astype(np.int64)
        # Of negative numbers the bits count down from the sign bit.
        ordered.append(np.where(bits >= 0, bits, -(bits & np.iinfo(word).max)))
    return np.abs(ordered[0] - ordered[1])
