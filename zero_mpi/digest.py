"""Digest: a 64-bit fingerprint of a vector that adds up over any blocks, so it needs no gather.

Not for: proof against an adversary; the weights are known.

What it detects: every change of one element of up to 4 bytes, surely. Changes of several, moves and swaps
included, but for chance: once in 2^64, and once in 2^32 where only the highest bits change, such as signs; an
element of 8 bytes counts as two. Zeros count: a vector and the same with zeros appended differ.
"""

from functools import lru_cache

import numpy as np

_PIECE = 8192
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


def digest(array: np.ndarray, start: int = 0, unit: int = 0) -> int:
    """Return the sum modulo 2^64 of each element's bits, plus one, times a weight of its position.

    Parameters
    ----------
    array : shape (n,), contiguous, 1, 2, 4 or 8 bytes an element. start : index of its first element in the
        unit. unit : index of the unit, so that equal units differ.

    Notes
    -----
    Multilinear hashing (Carter and Wegman 1979) with weights that are odd, so that no change of one element
    is lost: one weight for the place in a piece of 8192, times one for the piece. About 1 ns an element.
    """
    if array.dtype.itemsize not in _WORDS or array.dtype.hasobject:
        raise TypeError(f"array: expected elements of 1, 2, 4 or 8 bytes, got {array.dtype}")
    bits = array.view(_WORDS[array.dtype.itemsize])
    if array.dtype.itemsize == 8:
        # Two words an element.
        start *= 2
    weights, sums = _weights()
    total = done = 0
    while done < bits.size:
        piece, offset = divmod(start + done, _PIECE)
        part = bits[done : done + _PIECE - offset].astype(np.uint64)
        stop = offset + part.size
        done += part.size
        ones = int(sums[stop]) - int(sums[offset])
        total += (int(np.dot(part, weights[offset:stop])) + ones) * _weight(unit, piece)
    return total % 2**64


def rows_digest(*arrays: np.ndarray) -> int:
    """Return the digest of rows, such as those of x and y: a sum over rows, so in any order the same.

    Parameters
    ----------
    arrays : each with as many rows; one row is all that they have at an index.
    """
    total = 0
    for row in zip(*arrays, strict=True):
        # Mixed, or a sum would not tell which parts belong together.
        total += _mix(sum(digest(np.ascontiguousarray(part).reshape(-1), 0, i) for i, part in enumerate(row)))
    return total % 2**64


@lru_cache(maxsize=1)
def _weights() -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of the places in a piece, shape (8192,), uint64, odd; and their sums up to each."""
    weights = np.array([_mix(place) | 1 for place in range(_PIECE)], np.uint64)
    return weights, np.concatenate([np.zeros(1, np.uint64), np.cumsum(weights, dtype=np.uint64)])


@lru_cache(maxsize=65536)
def _weight(unit: int, piece: int) -> int:
    """Return the weight of a piece of a unit, odd."""
    return _mix((unit + 1) << 40 | piece) | 1


def _mix(z: int) -> int:
    """Return the finalizer of splitmix64 of `z` (Steele, Lea and Flood 2014)."""
    z = (z + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) % 2**64
    return z ^ z >> 31
