"""Digest: a 64-bit fingerprint of a vector that adds up over any blocks, so it needs no gather.

Not for: proof against an adversary. Two vectors that differ in one element always differ in digest; random
differences collide once in 2^64.
"""

import numpy as np

_PIECE = 65536
_WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def digest(array: np.ndarray, start: int = 0, unit: int = 0) -> int:
    """Return the sum modulo 2^64 of a mix of each element's bits and its position.

    Parameters
    ----------
    array : shape (n,), contiguous, 2, 4 or 8 bytes an element. start : index of its first element in the
        unit. unit : index of the unit, so that equal units differ.

    Notes
    -----
    The mix is the finalizer of splitmix64 (Steele, Lea and Flood 2014), a bijection of 64 bits, so a change
    in one element changes the sum.
    """
    bits = array.view(_WORDS[array.dtype.itemsize])
    total = 0
    for first in range(0, bits.size, _PIECE):
        piece = bits[first : first + _PIECE].astype(np.uint64)
        place = np.arange(start + first, start + first + piece.size, dtype=np.uint64)
        place += np.uint64(unit << 40)
        place = _mix(place)
        place ^= piece
        total += int(np.sum(_mix(place), dtype=np.uint64))
    return total % 2**64


def _mix(z: np.ndarray) -> np.ndarray:
    """Return the finalizer of splitmix64 of `z`, which is overwritten."""
    z += np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
