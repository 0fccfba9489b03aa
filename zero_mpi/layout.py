"""Blocks: n elements cut into contiguous blocks, one for each rank. Pure integers.

Not for: data, dtypes or communication.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Blocks:
    """Cut `numel` elements into `count` blocks whose sizes differ by at most one.

    The first ``numel % count`` blocks are the longer ones. Nothing is padded, and blocks may be empty, so
    formulas over blocks are exact for every size: 40 elements over 3 ranks are 14, 13 and 13.

    Parameters
    ----------
    numel : int, at least 0. Elements to cut.
    count : int, at least 1. Number of blocks.

    Raises
    ------
    ValueError : a negative `numel` or a `count` below 1.
    """

    numel: int
    count: int

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"numel: expected at least 0, got {self.numel}")
        if self.count < 1:
            raise ValueError(f"count: expected at least 1, got {self.count}")

    def start(self, i: int) -> int:
        """Return the index of the first element of block `i`."""
        return i * (self.numel // self.count) + min(i, self.numel % self.count)

    def stop(self, i: int) -> int:
        """Return one past the index of the last element of block `i`."""
        return self.start(i + 1)

    def size(self, i: int) -> int:
        """Return the number of elements of block `i`."""
        return self.numel // self.count + (i < self.numel % self.count)

    def of(self, i: int) -> slice:
        """Return block `i` as a slice of the whole."""
        return slice(self.start(i), self.stop(i))

    def slices(self) -> list[slice]:
        """Return all blocks in order, as slices of the whole."""
        return [self.of(i) for i in range(self.count)]

    @property
    def largest(self) -> int:
        """Number of elements of the largest block, which is always block 0."""
        return self.size(0)
