"""Closed forms: the bytes a rank holds and the bytes it sends. Pure integers and fractions.

Not for: measuring. It imports nothing of this package, so it cannot peek at what it predicts.

Sources: ZeRO paper (Rajbhandari et al., arXiv 1910.02054 v3), section 5 for memory (2 + 2 + K bytes a
parameter, K = 12 for mixed-precision Adam) and section 7 for traffic; ring collectives after Patarasuk and
Yuan 2009; recursive halving after Thakur, Rabenseifner and Gropp 2005. All count from below: (N-1)/N of a
vector, never the whole vector.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

BANDS = ("params", "grads", "optimizer")


class Claim(NamedTuple):
    """What a scheme says of itself: the bands it cuts over ranks, and the collectives that follow.

    Fields
    ------
    sharded : the bands ("params", "grads", "optimizer") of which a rank holds only its own block.
    reduce_every : when gradients are reduced, unless the user says otherwise: "step" or "micro-batch".
    grad_all_gathers : all-gathers of the gradients after each reduce-scatter of them (the second half of an
        all-reduce), in the reduce dtype.
    update_all_gathers : all-gathers of the parameters after each update, in the gather dtype.
    use_all_gathers : all-gathers of the parameters before each forward and each backward of a unit.
    """

    sharded: tuple[str, ...]
    reduce_every: str
    grad_all_gathers: int
    update_all_gathers: int
    use_all_gathers: int


# ZeRO paper, section 5 (which bands are partitioned) and section 7 (which collectives follow from it).
DP = Claim((), "step", 1, 0, 0)
ZERO1 = Claim(("optimizer",), "step", 0, 1, 0)
ZERO2 = Claim(("grads", "optimizer"), "micro-batch", 0, 1, 0)
ZERO3 = Claim(("params", "grads", "optimizer"), "micro-batch", 0, 0, 1)


class Itemsizes(NamedTuple):
    """Bytes an element takes in each band at rest, and on the wire in each kind of collective."""

    params: int
    grads: int
    optimizer: int
    reduce: int
    gather: int


class Workload(NamedTuple):
    """What is trained on how many ranks, as far as bytes depend on it.

    Fields
    ------
    units : numel of each unit; blocks are cut within a unit.
    size : number of ranks N. accumulate : micro-batches of a step, K.
    reduce_every : "step" or "micro-batch"; None leaves it to the scheme.
    frozen : units that have parameters, but no gradient and no optimizer state.
    reducer : the algorithm of reduce-scatter, a key of `REDUCE_SCATTERS`.
    updated : whether parameters were updated; no step that overflowed does.
    """

    units: tuple[int, ...]
    items: Itemsizes
    size: int
    accumulate: int = 1
    reduce_every: str | None = None
    frozen: tuple[int, ...] = ()
    reducer: str = "ring"
    updated: bool = True

    @property
    def n_params(self) -> int:
        """Number of parameters, Ψ."""
        return sum(self.units)

    @property
    def largest(self) -> int:
        """Number of elements of the largest unit."""
        return max(self.units)


# Memory.


def block_numel(numel: int, size: int, rank: int) -> int:
    """Return the elements of block `rank`; the first ``numel % size`` blocks hold one more."""
    return numel // size + (rank < numel % size)


def block_start(numel: int, size: int, rank: int) -> int:
    """Return the first element of block `rank`; `numel` for one past the last."""
    return rank * (numel // size) + min(rank, numel % size)


def sharded_bands(claim: Claim, reduce_every: str | None) -> tuple[str, ...]:
    """Return the bands that are cut over ranks: gradients reduced once a step are kept whole until then."""
    deferred = claim.reduce_every == "micro-batch" and reduce_every == "step"
    return tuple(band for band in claim.sharded if not (deferred and band == "grads"))


def resident_bytes(claim: Claim, work: Workload, rank: int) -> dict[str, int]:
    """Return the bytes of each band that `rank` holds, exact for every size."""
    sharded = sharded_bands(claim, work.reduce_every)
    held = dict.fromkeys(BANDS, 0)
    for u, numel in enumerate(work.units):
        for band in BANDS if u not in work.frozen else ("params",):
            here = block_numel(numel, work.size, rank) if band in sharded else numel
            held[band] += getattr(work.items, band) * here
    return held


def bytes_per_param(claim: Claim, work: Workload) -> Fraction:
    """Return the mean over ranks of resident bytes per parameter: 16, 4 + 12/N, 2 + 14/N, 16/N when mixed."""
    whole, cut = _whole_and_cut(claim, work)
    return whole + cut / work.size


def bytes_per_param_text(claim: Claim, work: Workload) -> str:
    """Return the closed form of `bytes_per_param` as it is read in the paper, such as "4 + 12/N"."""
    whole, cut = _whole_and_cut(claim, work)
    return " + ".join(([_number(whole)] if whole else []) + ([f"{_number(cut)}/N"] if cut else [])) or "0"


def _whole_and_cut(claim: Claim, work: Workload) -> tuple[Fraction, Fraction]:
    """Return the bytes per parameter of whole bands and of sharded ones."""
    sharded = sharded_bands(claim, work.reduce_every)
    trained = Fraction(
        sum(numel for u, numel in enumerate(work.units) if u not in work.frozen), work.n_params
    )
    cut, whole = Fraction(0), Fraction(0)
    for band in BANDS:
        nbytes = getattr(work.items, band) * (1 if band == "params" else trained)
        if band in sharded:
            cut += nbytes
        else:
            whole += nbytes
    return whole, cut


def transient_peak_bytes(claim: Claim, work: Workload) -> dict[str, int]:
    """Return the most bytes each kind of transient array of a scheme may take: one unit at a time.

    That is the promise which makes 16/N true while a step runs (ZeRO paper, section 7.2.2): a whole unit of
    parameters to compute with, of its gradient, and of either on the wire; and what its sum is received in.
    """
    largest, items = work.largest, work.items
    return {
        "widened unit": 4 * largest,
        "gathered unit": 4 * largest if "params" in claim.sharded else 0,
        "unit gradient": 4 * largest,
        "reduce wire": items.reduce * largest,
        "gather wire": items.gather * largest,
        "receive buffer": items.reduce * _receive_numel(work.reducer, largest, work.size),
    }


# Traffic.


class Collectives(NamedTuple):
    """How often a unit goes through each collective in one step."""

    reduce_scatters: int
    grad_all_gathers: int
    param_all_gathers: int


def collectives(claim: Claim, work: Workload, u: int) -> Collectives:
    """Return the collectives of unit `u` in one step.

    With K micro-batches: a reduction each step or each micro-batch; parameters are gathered after the update
    where they changed, or before each use. Backward goes down to the first unit that is trained.
    """
    every = work.reduce_every or claim.reduce_every
    trained = u not in work.frozen
    reductions = (work.accumulate if every == "micro-batch" else 1) * trained
    uses = work.accumulate * (1 + (u >= first_trained(work.units, work.frozen)))
    return Collectives(
        reductions,
        claim.grad_all_gathers * reductions,
        claim.update_all_gathers * (trained and work.updated) + claim.use_all_gathers * uses,
    )


def first_trained(units: tuple[int, ...], frozen: tuple[int, ...]) -> int:
    """Return the first unit that is not frozen, where backward ends; the number of units if there is none."""
    return next((u for u in range(len(units)) if u not in frozen), len(units))


def all_gather_sent(numel: int, size: int, rank: int) -> list[int]:
    """Return the elements of each message of a ring all-gather: all blocks but the right neighbour's."""
    return _blocks_but(numel, size, (rank + 1) % size)


def reduce_scatter_sent(numel: int, size: int, rank: int) -> list[int]:
    """Return the elements of each message of a ring reduce-scatter: all blocks but one's own.

    So it is too where the ring turns the other way, and where each block goes straight to its owner.
    """
    return _blocks_but(numel, size, rank)


def naive_sent(numel: int, size: int, rank: int) -> list[int]:
    """Return the elements of each message where everyone sends all it has to everyone."""
    return [numel] * (size - 1)


def halving_sent(numel: int, size: int, rank: int) -> list[int]:
    """Return the elements of each message of a recursive-halving reduce-scatter, for any number of ranks.

    With p the largest power of two up to N and r = N - p: of each of the first r pairs of ranks the odd one
    hands all it has to the even one; p ranks remain, which swap halves, quarters, ... of the vector; at the
    end the even ones hand the odd ones their block.
    """
    remaining = 2 ** (size.bit_length() - 1)
    folded = size - remaining
    if rank < 2 * folded and rank % 2:
        return [numel]
    me = rank // 2 if rank < 2 * folded else rank - folded

    def edge(i: int) -> int:
        return block_start(numel, size, 2 * i if i < folded else i + folded)

    sent, low, high = [], 0, remaining
    while high - low > 1:
        middle = (low + high) // 2
        if me < middle:
            sent.append(edge(high) - edge(middle))
            high = middle
        else:
            sent.append(edge(middle) - edge(low))
            low = middle
    return [*sent, block_numel(numel, size, rank + 1)] if me < folded else sent


# The elements of each message a rank sends in one reduce-scatter, by algorithm.
REDUCE_SCATTERS: dict[str, Callable[[int, int, int], list[int]]] = {
    "ring": reduce_scatter_sent,
    "reversed-ring": reduce_scatter_sent,
    "rank-order": reduce_scatter_sent,
    "recursive-halving": halving_sent,
    "naive": naive_sent,
}


def _receive_numel(reducer: str, numel: int, size: int) -> int:
    """Return the most elements a reduce-scatter holds beside the vector: what came, and its sum."""
    block = block_numel(numel, size, 0)
    return {"rank-order": size * block, "recursive-halving": numel, "naive": numel + block}.get(
        reducer, block
    )


def sent_bytes(claim: Claim, work: Workload, rank: int) -> dict[str, int]:
    """Return the bytes that `rank` sends in one step, for each kind of collective."""
    scattered = gathered = 0
    for u, numel in enumerate(work.units):
        times = collectives(claim, work, u)
        once = sum(all_gather_sent(numel, work.size, rank))
        scattered += (
            times.reduce_scatters
            * work.items.reduce
            * sum(REDUCE_SCATTERS[work.reducer](numel, work.size, rank))
        )
        gathered += times.grad_all_gathers * work.items.reduce * once
        gathered += times.param_all_gathers * work.items.gather * once
    return {"reduce-scatter": scattered, "all-gather": gathered}


def sent_bytes_all_ranks(claim: Claim, work: Workload) -> int:
    """Return the bytes all ranks together send in one step: (N-1) n itemsize for each ring collective."""
    total = 0
    for u, numel in enumerate(work.units):
        times = collectives(claim, work, u)
        total += times.reduce_scatters * work.items.reduce * _all_ranks(work.reducer, numel, work.size)
        gathers = times.grad_all_gathers * work.items.reduce + times.param_all_gathers * work.items.gather
        total += gathers * (work.size - 1) * numel
    return total


def _all_ranks(reducer: str, numel: int, size: int) -> int:
    """Return the elements all ranks together send in one reduce-scatter, in closed form."""
    if reducer == "naive":
        return size * (size - 1) * numel
    folded = size - 2 ** (size.bit_length() - 1) if reducer == "recursive-halving" else 0
    return (size - 1) * numel + sum(block_numel(numel, size, 2 * i + 1) for i in range(folded))


def sent_messages(claim: Claim, work: Workload, rank: int, max_message_bytes: int) -> int:
    """Return the messages `rank` sends in one step: one for each block sent, more for blocks over the limit.

    Empty blocks are sent too, so it is (N-1) for each ring collective wherever no block exceeds the limit.
    """

    def messages(sent: list[int], itemsize: int) -> int:
        return sum(max(1, -(-numel * itemsize // max_message_bytes)) for numel in sent)

    total = 0
    for u, numel in enumerate(work.units):
        times = collectives(claim, work, u)
        scattered = REDUCE_SCATTERS[work.reducer](numel, work.size, rank)
        gathered = all_gather_sent(numel, work.size, rank)
        total += times.reduce_scatters * messages(scattered, work.items.reduce)
        total += times.grad_all_gathers * messages(gathered, work.items.reduce)
        total += times.param_all_gathers * messages(gathered, work.items.gather)
    return total


def traffic_units(claim: Claim, work: Workload) -> Fraction:
    """Return the mean over ranks of the traffic of a step, in units of n_params x wire bytes.

    2(N-1)/N for data parallel, ZeRO-1 and ZeRO-2, 3(N-1)/N for ZeRO-3; 2, 2, K+1 and 3K with K micro-batches.
    Each collective is counted in its own wire dtype, so the number does not depend on dtypes.
    """
    total = 0
    for u, numel in enumerate(work.units):
        times = collectives(claim, work, u)
        total += times.reduce_scatters * _all_ranks(work.reducer, numel, work.size)
        total += (times.grad_all_gathers + times.param_all_gathers) * (work.size - 1) * numel
    return Fraction(total, work.size * work.n_params)


def traffic_units_text(claim: Claim, work: Workload) -> str:
    """Return the closed form of `traffic_units`, such as "2(N-1)/N"; "> 2(N-1)/N" where none is so short."""
    vectors = sum(sum(collectives(claim, work, u)) * numel for u, numel in enumerate(work.units))
    times = Fraction(vectors, work.n_params)
    text = ("" if times == 1 else _number(times)) + "(N-1)/N"
    ring = Fraction(vectors * (work.size - 1), work.size * work.n_params)
    return text if traffic_units(claim, work) == ring else f"> {text}"


def control_sent(work: Workload) -> tuple[int, int]:
    """Return the control bytes and messages a rank sends in a step.

    Each passed around once: the rows of its K micro-batches before it, and its loss, the unit that
    overflowed and its sum of squares after backward; int64 and float64.
    """
    return 8 * (work.accumulate + 3) * (work.size - 1), 2 * (work.size - 1)


def _blocks_but(numel: int, size: int, kept: int) -> list[int]:
    return [block_numel(numel, size, b) for b in range(size) if b != kept]


def _number(value: Fraction) -> str:
    # As many digits as the four decimals printed beside it need.
    text = f"{float(value):.5f}".rstrip("0").rstrip(".")
    return f"{float(value):.3g}" if text == "0" else text
