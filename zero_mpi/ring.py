"""Ring collectives written by hand from `sendrecv` alone, and the reducer built on them.

Not for: averaging, dtypes or schemes. Nothing here knows what the numbers mean.

Three ranks, x = [a b c] in three blocks, rank 1's contribution to block a written a1:

    reduce-scatter        rank 0           rank 1           rank 2
    start                 a0 b0 c0         a1 b1 c1         a2 b2 c2
    step 0 sends          c0 -> 1          a1 -> 2          b2 -> 0
    then holds            b2+b0            c0+c1            a1+a2
    step 1 sends          b2+b0 -> 1       c0+c1 -> 2       a1+a2 -> 0
    then holds            a1+a2+a0         b2+b0+b1         c0+c1+c2

Block b is always summed in rank order b+1, b+2, ..., b. Floating-point sums depend on that order and on
nothing else, which is why schemes that share it learn the same bits.
"""

from collections.abc import Callable

import numpy as np

from .comm import Communicator
from .layout import Blocks
from .memory import Ledger


def reduce_scatter(
    comm: Communicator, x: np.ndarray, empty: Callable[[int, np.dtype], np.ndarray] = np.empty
) -> np.ndarray:
    """Sum `x` over the ranks; return this rank's block of the sum.

    Parameters
    ----------
    x : array, shape (n,), contiguous. Same n and dtype on every rank. Overwritten with partial sums.
    empty : allocates the one receive buffer, as (numel, dtype).

    Returns
    -------
    array, shape (blocks.size(rank),), dtype of `x`: block `rank` of the sum, not a view of `x`.

    Raises
    ------
    ValueError : x is not one-dimensional, contiguous and writable.

    Notes
    -----
    Collective. Sends n - blocks.size(rank) elements in N - 1 messages.
    Half of ring all-reduce: Patarasuk & Yuan 2009; ZeRO paper, sec. 7.1.
    """
    _check(comm, x)
    blocks = Blocks(x.size, comm.size)
    partial = [x[part] for part in blocks.slices()]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = empty(blocks.largest, x.dtype)
    own = buffer[: partial[comm.rank].size]
    if comm.size == 1:
        own[...] = x
        return own
    with comm.collective("reduce-scatter"):
        # Before step s, block rank-s-1 of x holds the sum over ranks rank-s, ..., rank.
        for step in range(comm.size - 1):
            out = (comm.rank - step - 1) % comm.size
            into = (out - 1) % comm.size
            received = buffer[: partial[into].size]
            comm.sendrecv(partial[out], right, received, left)
            last = step == comm.size - 2
            np.add(received, partial[into], out=own if last else partial[into])
    return own


def all_gather(comm: Communicator, x: np.ndarray) -> None:
    """Fill `x` on every rank with the blocks that the ranks own.

    Parameters
    ----------
    x : array, shape (n,), contiguous. Same n and dtype on every rank. Block `rank` is read, all others are
        overwritten.

    Raises
    ------
    ValueError : x is not one-dimensional, contiguous and writable.

    Notes
    -----
    Collective. Sends n - blocks.size(rank + 1) elements in N - 1 messages; allocates nothing.
    """
    _check(comm, x)
    parts = [x[part] for part in Blocks(x.size, comm.size).slices()]
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.collective("all-gather"):
        # Before step s, blocks rank-s, ..., rank are in place.
        for step in range(comm.size - 1):
            out = (comm.rank - step) % comm.size
            into = (out - 1) % comm.size
            comm.sendrecv(parts[out], right, parts[into], left)


def all_reduce(
    comm: Communicator,
    x: np.ndarray,
    finish: Callable[[np.ndarray], None] | None = None,
    empty: Callable[[int, np.dtype], np.ndarray] = np.empty,
) -> None:
    """Replace `x` by its sum over the ranks, on every rank: a reduce-scatter, then an all-gather.

    Parameters
    ----------
    x : array, shape (n,), contiguous. Same n and dtype on every rank.
    finish : an element-wise function that changes the owner's sums in place before they are shared, such
        as a division. What an owner keeps is what the others receive.

    Notes
    -----
    Collective. Sends 2n - blocks.size(rank) - blocks.size(rank + 1) elements in 2(N - 1) messages.
    """
    own = reduce_scatter(comm, x, empty)
    if finish is not None:
        finish(own)
    x[Blocks(x.size, comm.size).of(comm.rank)] = own
    all_gather(comm, x)


class Ring:
    """The default reducer: the collectives of a unit, in the ring's order of summation.

    A reducer is all that a scheme knows of communication. Other orders of summation are other reducers with
    these three methods, not other schemes.
    """

    name = "ring"

    def __init__(self, comm: Communicator, ledger: Ledger) -> None:
        self.comm = comm
        self._empty = lambda numel, dtype: ledger.empty("ring buffer", numel, dtype)

    def reduce_scatter(self, u: int, x: np.ndarray) -> np.ndarray:
        """Return this rank's block of the sum of unit `u`; `x` is overwritten. Collective."""
        self.comm.unit = u
        return reduce_scatter(self.comm, x, self._empty)

    def all_gather(self, u: int, x: np.ndarray) -> None:
        """Fill `x` with unit `u` from the blocks that the ranks own. Collective."""
        self.comm.unit = u
        all_gather(self.comm, x)

    def all_reduce(self, u: int, x: np.ndarray, finish: Callable[[np.ndarray], None]) -> None:
        """Replace `x` by the sum of unit `u`, changed by `finish` on its owner. Collective."""
        self.comm.unit = u
        all_reduce(self.comm, x, finish, self._empty)


def _check(comm: Communicator, x: np.ndarray) -> None:
    if not isinstance(x, np.ndarray) or x.dtype.hasobject:
        # Bytes of Python objects are addresses, which mean nothing on another rank.
        what = "an array of Python objects" if isinstance(x, np.ndarray) else type(x).__name__
        raise TypeError(f"x: expected a numpy array of numbers, got {what} (rank {comm.rank})")
    if x.ndim != 1 or not x.flags.c_contiguous:
        order = (
            "Fortran-ordered"
            if x.flags.f_contiguous and x.ndim > 1
            else "C-ordered"
            if x.flags.c_contiguous
            else "non-contiguous"
        )
        raise ValueError(
            f"x: expected a contiguous array of shape (n,), got a {order} one of shape {x.shape} "
            f"(rank {comm.rank})"
        )
    if not x.flags.writeable:
        raise ValueError(f"x: expected a writable array, got a read-only one (rank {comm.rank})")
