"""Closed forms: the bytes a rank holds and the bytes it sends. Pure integers and fractions.

Not for: measuring. It imports nothing of this package, so it cannot peek at what it predicts.

Sources: ZeRO paper (Rajbhandari et al., arXiv 1910.02054 v3), section 5 for memory (2 + 2 + K bytes a
parameter, K = 12 for mixed-precision Adam) and section 7 for traffic; ring collectives after Patarasuk and
Yuan 2009. Both count from below: (N-1)/N of a vector, never the whole vector.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Claim(NamedTuple):
    """What a scheme says of itself: the bands it cuts over ranks, and the collectives of a step for a unit.

    Fields
    ------
    sharded : the bands ("params", "grads", "optimizer") of which a rank holds only its own block.
    reduce_scatters : reduce-scatters of the gradients, in the reduce dtype.
    grad_all_gathers : all-gathers of the gradients (the second half of an all-reduce), in the reduce dtype.
    param_all_gathers : all-gathers of the parameters, in the gather dtype.
    """

    sharded: tuple[str, ...]
    reduce_scatters: int
    grad_all_gathers: int
    param_all_gathers: int


# ZeRO paper, section 5 (which bands are partitioned) and section 7 (which collectives follow from it).
DP = Claim((), 1, 1, 0)
ZERO1 = Claim(("optimizer",), 1, 0, 1)
ZERO2 = Claim(("grads", "optimizer"), 1, 0, 1)
ZERO3 = Claim(("params", "grads", "optimizer"), 1, 0, 2)


class Itemsizes(NamedTuple):
    """Bytes an element takes in each band at rest, and on the wire in each kind of collective."""

    params: int
    grads: int
    optimizer: int
    reduce: int
    gather: int


def block_numel(numel: int, size: int, rank: int) -> int:
    """Return the elements of block `rank`; the first ``numel % size`` blocks hold one more."""
    return numel // size + (rank < numel % size)


def resident_bytes(
    claim: Claim, units: Sequence[int], items: Itemsizes, size: int, rank: int
) -> dict[str, int]:
    """Return the bytes of each band that `rank` holds, exact for every size.

    Parameters
    ----------
    units : numel of each unit; blocks are cut within a unit.
    """
    whole = sum(units)
    shard = sum(block_numel(numel, size, rank) for numel in units)
    return {
        band: getattr(items, band) * (shard if band in claim.sharded else whole)
        for band in ("params", "grads", "optimizer")
    }


def bytes_per_param(claim: Claim, items: Itemsizes, size: int) -> Fraction:
    """Return the mean over ranks of resident bytes per parameter: 16, 4 + 12/N, 2 + 14/N, 16/N when mixed."""
    return sum(
        (
            Fraction(getattr(items, band), size if band in claim.sharded else 1)
            for band in ("params", "grads", "optimizer")
        ),
        Fraction(0),
    )


def bytes_per_param_text(claim: Claim, items: Itemsizes) -> str:
    """Return the closed form of `bytes_per_param` as it is read in the paper, such as "4 + 12/N"."""
    cut = sum(getattr(items, band) for band in claim.sharded)
    whole = items.params + items.grads + items.optimizer - cut
    return " + ".join(([f"{whole}"] if whole else []) + ([f"{cut}/N"] if cut else []))


def reduce_scatter_sent(numel: int, size: int, rank: int) -> int:
    """Return the elements `rank` sends in one ring reduce-scatter: all blocks but its own."""
    return numel - block_numel(numel, size, rank)


def all_gather_sent(numel: int, size: int, rank: int) -> int:
    """Return the elements `rank` sends in one ring all-gather: all blocks but its right neighbour's."""
    return numel - block_numel(numel, size, (rank + 1) % size)


def sent_bytes(claim: Claim, units: Sequence[int], items: Itemsizes, size: int, rank: int) -> dict[str, int]:
    """Return the bytes that `rank` sends in one step, for each kind of collective."""
    reduced = sum(reduce_scatter_sent(numel, size, rank) for numel in units)
    gathered = sum(all_gather_sent(numel, size, rank) for numel in units)
    return {
        "reduce-scatter": claim.reduce_scatters * items.reduce * reduced,
        "all-gather": gathered
        * (claim.grad_all_gathers * items.reduce + claim.param_all_gathers * items.gather),
    }


def sent_bytes_all_ranks(claim: Claim, units: Sequence[int], items: Itemsizes, size: int) -> int:
    """Return the bytes all ranks together send in one step: (N-1) n itemsize for each collective."""
    per_param = (
        claim.reduce_scatters + claim.grad_all_gathers
    ) * items.reduce + claim.param_all_gathers * items.gather
    return (size - 1) * sum(units) * per_param


def sent_messages(
    claim: Claim, units: Sequence[int], items: Itemsizes, size: int, rank: int, max_message_bytes: int
) -> int:
    """Return the messages `rank` sends in one step: one for each block sent, more for blocks over the limit.

    Empty blocks are sent too, so it is (N-1) for each collective wherever no block exceeds the limit.
    """

    def messages(numel: int, itemsize: int, kept: int) -> int:
        sent = [block_numel(numel, size, b) * itemsize for b in range(size) if b != kept]
        return sum(max(1, -(-nbytes // max_message_bytes)) for nbytes in sent)

    right = (rank + 1) % size
    return sum(
        claim.reduce_scatters * messages(numel, items.reduce, rank)
        + claim.grad_all_gathers * messages(numel, items.reduce, right)
        + claim.param_all_gathers * messages(numel, items.gather, right)
        for numel in units
    )


def traffic_units(claim: Claim, size: int) -> Fraction:
    """Return the mean over ranks of the traffic of a step, in units of n_params x wire bytes.

    2(N-1)/N for data parallel, ZeRO-1 and ZeRO-2, 3(N-1)/N for ZeRO-3. Each collective is counted in its own
    wire dtype, so the number does not depend on dtypes.
    """
    collectives = claim.reduce_scatters + claim.grad_all_gathers + claim.param_all_gathers
    return Fraction(collectives * (size - 1), size)


def control_sent(size: int) -> tuple[int, int]:
    """Return the control bytes and messages a rank sends in a step: its loss, float64, passed around once."""
    return 8 * (size - 1), size - 1


def transient_peak_bytes(claim: Claim, units: Sequence[int], items: Itemsizes, size: int) -> dict[str, int]:
    """Return the most bytes each kind of transient array of a scheme may take: one unit at a time.

    That is the promise which makes 16/N true while a step runs (ZeRO paper, section 7.2.2): a whole unit of
    parameters to compute with, of its gradient, and of either on the wire; and one block to receive into.
    """
    largest = max(units)
    return {
        "widened unit": 4 * largest,
        "gathered unit": 4 * largest if "params" in claim.sharded else 0,
        "unit gradient": 4 * largest,
        "reduce wire": items.reduce * largest,
        "gather wire": items.gather * largest,
        "ring buffer": items.reduce * block_numel(largest, size, 0),
    }
