"""Ring collectives written by hand from `sendrecv` alone.

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
from functools import lru_cache
from typing import NoReturn

import numpy as np

from .comm import Communicator
from .layout import Blocks


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
    parts = blocks_of(comm, x)
    buffer = empty(parts[0].size, x.dtype)
    own = buffer[: parts[comm.rank].size]
    if comm.size == 1:
        own[...] = x
    else:
        _pass_and_add(comm, parts, buffer, own)
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
    _pass_on(comm, blocks_of(comm, x))


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
    empty : allocates the one receive buffer, as (numel, dtype).

    Raises
    ------
    ValueError : x is not one-dimensional, contiguous and writable.

    Notes
    -----
    Collective. Sends 2n - blocks.size(rank) - blocks.size(rank + 1) elements in 2(N - 1) messages.
    """
    parts = blocks_of(comm, x)
    own = parts[comm.rank]
    if comm.size > 1:
        _pass_and_add(comm, parts, empty(parts[0].size, x.dtype), own)
    if finish is not None:
        finish(own)
    _pass_on(comm, parts)


def _pass_and_add(comm: Communicator, parts: list[np.ndarray], buffer: np.ndarray, own: np.ndarray) -> None:
    """Run the loop of reduce-scatter over the blocks of x; write the sum of block `rank` to `own`.

    Parameters
    ----------
    buffer : shape (largest block,). Receives. `own` may be its beginning, or the block in `parts` itself.
    """
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    with comm.collective("reduce-scatter", sent_stays=True):
        # In step s (from 0) `out` is block rank-s-1, and holds the sum over ranks rank-s, ..., rank.
        for out, into in _hops(left, size):
            mine = parts[into]
            received = buffer[: mine.size]
            comm.sendrecv(parts[out], right, received, left)
            np.add(received, mine, own if into == rank else mine)


def _pass_on(comm: Communicator, parts: list[np.ndarray]) -> None:
    """Run the loop of all-gather over the blocks of x."""
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    with comm.collective("all-gather", sent_stays=True):
        # In step s (from 0) `out` is block rank-s, and blocks rank-s, ..., rank are in place.
        for out, into in _hops(rank, size):
            comm.sendrecv(parts[out], right, parts[into], left)


# A model has few sizes of units, and a ring over a short one takes little longer than cutting it: both kept.


@lru_cache(maxsize=256)
def _hops(first: int, size: int) -> list[tuple[int, int]]:
    """Return the block that goes out and the one that comes in, for each step; `first` goes out first."""
    return [((first - step) % size, (first - step - 1) % size) for step in range(size - 1)]


@lru_cache(maxsize=256)
def _slices(numel: int, size: int) -> list[slice]:
    return Blocks(numel, size).slices()


def blocks_of(comm: Communicator, x: np.ndarray) -> list[np.ndarray]:
    """Return the blocks of `x`, one a rank, as views; refuse an `x` that a ring cannot work in."""
    fits = isinstance(x, np.ndarray) and x.ndim == 1 and not x.dtype.hasobject
    if not fits or not (flags := x.flags).c_contiguous or not flags.writeable:
        _refuse(comm, x)
    return [x[part] for part in _slices(x.size, comm.size)]


def _refuse(comm: Communicator, x: np.ndarray) -> NoReturn:
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
    raise ValueError(f"x: expected a writable array, got a read-only one (rank {comm.rank})")
