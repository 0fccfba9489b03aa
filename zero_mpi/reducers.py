"""Reducers: the collectives of a unit, in an order of summation. All that a scheme knows of communication.

Not for: schemes or dtypes. What each sends is in formulas.py, the order it sums in once more in reference.py.

An order of summation is chosen here and nowhere else: `REDUCERS` is the one list. They differ in the
reduce-scatter; gathering sums nothing, and is the ring's in all of them but the library's.
"""

from collections.abc import Callable

import numpy as np

from . import ring
from .comm import Communicator
from .layout import Blocks
from .memory import Ledger

Empty = Callable[[int, np.dtype], np.ndarray]


class Reducer:
    """The three collectives of a unit; a subclass says how blocks are summed.

    Attributes
    ----------
    name : as `--reduction` takes it.
    held_to : the algorithm of formulas.py whose bytes it must send; None if its bytes are not counted.
    order : in the order of what block b is summed, in words; "" if nobody outside it knows.
    """

    name: str
    held_to: str | None
    order: str

    def __init__(self, comm: Communicator, ledger: Ledger) -> None:
        self.comm = comm
        self._empty: Empty = lambda numel, dtype: ledger.empty("receive buffer", numel, dtype)

    def reduce_scatter(self, u: int, x: np.ndarray) -> np.ndarray:
        """Return this rank's block of the sum of unit `u`; `x` is overwritten. Collective."""
        self.comm.unit = u
        return self._sum(x)

    def all_gather(self, u: int, x: np.ndarray) -> None:
        """Fill `x` with unit `u` from the blocks that the ranks own. Collective."""
        self.comm.unit = u
        ring.all_gather(self.comm, x)

    def all_reduce(self, u: int, x: np.ndarray, finish: Callable[[np.ndarray], None]) -> None:
        """Replace `x` by the sum of unit `u`, changed by `finish` on its owner. Collective.

        What an owner keeps is what the others receive.
        """
        own = self.reduce_scatter(u, x)
        finish(own)
        x[Blocks(x.size, self.comm.size).of(self.comm.rank)] = own
        self.all_gather(u, x)

    def _sum(self, x: np.ndarray) -> np.ndarray:
        """Return this rank's block of the sum of `x` over the ranks. Collective."""
        raise NotImplementedError


class Ring(Reducer):
    """The default: N - 1 hops to the right."""

    name = "ring"
    held_to = "ring"
    order = "of ranks b+1, b+2, ..., b"

    def all_reduce(self, u: int, x: np.ndarray, finish: Callable[[np.ndarray], None]) -> None:
        self.comm.unit = u
        ring.all_reduce(self.comm, x, finish, self._empty)

    def _sum(self, x: np.ndarray) -> np.ndarray:
        return ring.reduce_scatter(self.comm, x, self._empty)


class ReversedRing(Reducer):
    """The ring turned the other way: as many bytes, other bits from four ranks on (a + b = b + a)."""

    name = "reversed-ring"
    held_to = "reversed-ring"
    order = "of ranks b-1, b-2, ..., b"

    def _sum(self, x: np.ndarray) -> np.ndarray:
        return reversed_ring(self.comm, x, self._empty)


class RankOrder(Reducer):
    """Each block goes straight to its owner, who adds up what came in the order of ranks."""

    name = "rank-order"
    held_to = "rank-order"
    order = "of ranks 0, 1, ..., N-1"

    def _sum(self, x: np.ndarray) -> np.ndarray:
        return rank_order(self.comm, x, self._empty)


class RecursiveHalving(Reducer):
    """Swap halves, then quarters, ...: log2 N messages where the ring has N - 1."""

    name = "recursive-halving"
    held_to = "recursive-halving"
    order = "of a tree: halves, then quarters and so on"

    def _sum(self, x: np.ndarray) -> np.ndarray:
        return recursive_halving(self.comm, x, self._empty)


class Naive(Reducer):
    """Everyone sends its whole gradient to everyone: right, and its sum costs N times what it has to.

    It is held to what ZeRO promises, the ring's bytes, and so fails the check of traffic from N = 2 on.
    """

    name = "naive"
    held_to = "ring"
    order = "of ranks 0, 1, ..., N-1"

    def _sum(self, x: np.ndarray) -> np.ndarray:
        return naive(self.comm, x, self._empty)


class Library(Reducer):
    """The MPI library's own collectives: calls are counted, bytes and orders are the library's business."""

    name = "library"
    held_to = None
    order = ""

    def reduce_scatter(self, u: int, x: np.ndarray) -> np.ndarray:
        self.comm.unit = u
        own = self._empty(Blocks(x.size, self.comm.size).size(self.comm.rank), x.dtype)
        self.comm.library_reduce_scatter(x, own)
        return own

    def all_gather(self, u: int, x: np.ndarray) -> None:
        self.comm.unit = u
        self.comm.library_all_gather(x)

    def all_reduce(self, u: int, x: np.ndarray, finish: Callable[[np.ndarray], None]) -> None:
        self.comm.unit = u
        self.comm.library_all_reduce(x)
        finish(x)


REDUCERS: dict[str, type[Reducer]] = {
    R.name: R for R in (Ring, ReversedRing, RecursiveHalving, RankOrder, Naive, Library)
}


def reversed_ring(comm: Communicator, x: np.ndarray, empty: Empty = np.empty) -> np.ndarray:
    """Sum `x` over the ranks in a ring to the left; return this rank's block, as `ring.reduce_scatter` does.

    Collective. Sends n - blocks.size(rank) elements in N - 1 messages.
    """
    partial = ring.blocks_of(comm, x)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffer = empty(partial[0].size, x.dtype)
    with comm.collective("reduce-scatter"):
        # Before step s, block rank+s+1 of x holds the sum over ranks rank+s, ..., rank.
        for step in range(comm.size - 1):
            out = (comm.rank + step + 1) % comm.size
            into = (out + 1) % comm.size
            received = buffer[: partial[into].size]
            comm.sendrecv(partial[out], left, received, right)
            np.add(received, partial[into], out=partial[into])
    own = buffer[: partial[comm.rank].size]
    own[...] = partial[comm.rank]
    return own


def rank_order(comm: Communicator, x: np.ndarray, empty: Empty = np.empty) -> np.ndarray:
    """Send each block of `x` to its owner; return this rank's block, added up in the order of ranks.

    Collective. Sends n - blocks.size(rank) elements in N - 1 messages, and holds N blocks at once.
    """
    parts = ring.blocks_of(comm, x)
    mine = parts[comm.rank]
    came = empty(comm.size * mine.size, x.dtype).reshape(comm.size, mine.size)
    came[comm.rank] = mine
    with comm.collective("reduce-scatter"):
        for step in range(1, comm.size):
            dest, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            comm.sendrecv(parts[dest], dest, came[source], source)
    for rank in range(1, comm.size):
        np.add(came[0], came[rank], out=came[0])
    return came[0]


def recursive_halving(comm: Communicator, x: np.ndarray, empty: Empty = np.empty) -> np.ndarray:
    """Sum `x` over the ranks by swapping halves; return this rank's block. Any number of ranks.

    Six ranks: first 1 hands all it has to 0, and 3 to 2. The four that remain stand for blocks 01, 23, 4 and
    5: the first two swap halves with the last two, keep 0123 or 45, then swap within their pair. At the end 0
    hands block 1 to rank 1, and 2 block 3 to rank 3.

    Collective. Sends n (1 - 1/N) elements in log2 N messages where N is a power of two (Thakur, Rabenseifner
    and Gropp 2005); `formulas.halving_sent` has the others.
    """
    ring.blocks_of(comm, x)
    blocks, rank = Blocks(x.size, comm.size), comm.rank
    remaining = 2 ** (comm.size.bit_length() - 1)
    folded = comm.size - remaining
    nothing = x[:0]
    mine = blocks.of(rank)

    def first_block(i: int) -> int:
        return 2 * i if i < folded else i + folded

    with comm.collective("reduce-scatter"):
        if rank < 2 * folded and rank % 2:
            comm.sendrecv(x, rank - 1, nothing, None)
            own = empty(blocks.size(rank), x.dtype)
            comm.sendrecv(nothing, None, own, rank - 1)
            return own
        buffer = empty(x.size, x.dtype)
        if rank < 2 * folded:
            comm.sendrecv(nothing, None, buffer, rank + 1)
            np.add(x, buffer, out=x)
        me = rank // 2 if rank < 2 * folded else rank - folded
        low, high = 0, remaining
        while high - low > 1:
            middle = (low + high) // 2
            half = middle - low
            edges = [blocks.start(first_block(i)) for i in (low, middle, high)]
            lower, upper = x[edges[0] : edges[1]], x[edges[1] : edges[2]]
            if me < middle:
                keep, give, partner, high = lower, upper, me + half, middle
            else:
                keep, give, partner, low = upper, lower, me - half, middle
            received = buffer[: keep.size]
            peer = first_block(partner)
            comm.sendrecv(give, peer, received, peer)
            np.add(keep, received, out=keep)
        if me < folded:
            comm.sendrecv(x[blocks.of(rank + 1)], rank + 1, nothing, None)
    own = buffer[: blocks.size(rank)]
    own[...] = x[mine]
    return own


def naive(comm: Communicator, x: np.ndarray, empty: Empty = np.empty) -> np.ndarray:
    """Send all of `x` to everyone; return this rank's block, added up in the order of ranks.

    Collective. Sends (N - 1) n elements in N - 1 messages.
    """
    ring.blocks_of(comm, x)
    mine = Blocks(x.size, comm.size).of(comm.rank)
    whole = empty(x.size, x.dtype)
    own = empty(x[mine].size, x.dtype)
    nothing = x[:0]
    with comm.collective("reduce-scatter"):
        for sender in range(comm.size):
            if comm.rank == sender:
                for dest in range(comm.size):
                    if dest != sender:
                        comm.sendrecv(x, dest, nothing, None)
            else:
                comm.sendrecv(nothing, None, whole, sender)
            part = (x if comm.rank == sender else whole)[mine]
            if sender == 0:
                own[...] = part
            else:
                np.add(own, part, out=own)
    return own
