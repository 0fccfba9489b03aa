"""Precision: the dtype each band is stored in, and the dtype it travels in.

Not for: converting arrays in the right place; schemes' tools do that (schemes/base.py).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

# Bits of (significand with its hidden bit, exponent), IEEE 754 and bfloat16.
_FORMATS = {"float64": (53, 11), "float32": (24, 8), "bfloat16": (8, 8), "float16": (11, 5)}

# What float32, in which all is computed, holds of the numbers above 0, rounded inwards to be said.
LEAST, MOST = 1.5e-45, 3.4e38

# Storage of parameters and gradients. Master weights and Adam's moments are always float32.
PRECISIONS = {"mixed": "float16", "bf16": "bfloat16", "fp32": "float32"}
WIRE_DTYPES = tuple(_FORMATS)

# Elements converted at a time: two float32 pieces fit in a first-level cache of 32 KiB or more.
PIECE = 4096

# Elements that numpy is given at a time where it has to cast on the way: it takes a buffer for each array, of
# 8192 elements unless there are fewer, that no ledger knows.
CAST_PIECE = 2048


def dtype_of(name: str) -> np.dtype:
    """Return the numpy dtype called `name`; bfloat16 needs the optional package ml_dtypes.

    Raises
    ------
    ValueError : an unknown name, or bfloat16 without ml_dtypes.
    """
    if name not in _FORMATS:
        raise ValueError(f"dtype: expected one of {', '.join(_FORMATS)}, got {name}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError("bfloat16 needs the package ml_dtypes: pip install 'zero_mpi[bf16]'") from None
    return np.dtype(ml_dtypes.bfloat16)


def holds(wide: str, narrow: str) -> bool:
    """Return whether every value of dtype `narrow` is also a value of dtype `wide`."""
    return all(w >= n for w, n in zip(_FORMATS[wide], _FORMATS[narrow], strict=True))


@dataclass(frozen=True)
class Precision:
    """Names of dtypes: `params` and `grads` at rest, `reduce` and `gather` on the wire.

    Raises
    ------
    ValueError : a dtype that is unknown or missing, or one that would not carry what it must:
        the gather dtype has to hold the parameters' dtype exactly.
    """

    name: str
    params: str
    grads: str
    reduce: str
    gather: str

    @classmethod
    def named(
        cls, name: str, reduce: str = "float32", gather: str = "float32", grads: str | None = None
    ) -> "Precision":
        """Return the precision called "mixed", "bf16" or "fp32" with the wire dtypes given.

        grads : storage of gradients where it is not the parameters' dtype: "float32" keeps what 16 bits lose
        when micro-batches add up.
        """
        if name not in PRECISIONS:
            raise ValueError(f"precision: expected one of {', '.join(PRECISIONS)}, got {name}")
        own = PRECISIONS[name]
        if grads not in (None, own, "float32"):
            expected = own if own == "float32" else f"{own} or float32"
            raise ValueError(
                f"grad dtype: expected {expected} with precision {name}, got {grads}; "
                "precision mixed has float16 gradients, bf16 has bfloat16"
            )
        return cls(name, own, grads or own, reduce, gather)

    def __post_init__(self) -> None:
        for name in (self.params, self.grads, self.reduce, self.gather):
            dtype_of(name)
        for what, name in (("params", self.params), ("grads", self.grads)):
            if name == "float64":
                raise ValueError(f"{what} dtype: expected float32 or 16 bits at rest, got float64")
        if not holds(self.gather, self.params):
            raise ValueError(
                f"gather dtype: expected one that holds {self.params} parameters exactly, got {self.gather}"
            )
        if (self.grads, self.reduce) == ("bfloat16", "float16"):
            raise ValueError(
                "reduce dtype: expected one with the range of bfloat16 gradients, got float16; "
                "use float32 or bfloat16"
            )

    @property
    def master(self) -> bool:
        """Whether a float32 master copy is kept beside the parameters."""
        return self.params != "float32"


def convert(source: np.ndarray, into: np.ndarray) -> None:
    """Write `source` into `into`, same shape, rounding to nearest even; allocates nothing."""
    np.copyto(into, source, casting="unsafe")


def round_through(source: np.ndarray, into: np.ndarray, through: np.dtype) -> None:
    """Write `source` into `into`, both (n,), rounded to dtype `through` on the way; one small buffer.

    `source` and `into` may be the same array.
    """
    if source is into and source.dtype == through:
        return
    if through in (source.dtype, into.dtype):
        convert(source, into)
        return
    rounded = np.empty(min(PIECE, source.size), through)
    for start in range(0, source.size, PIECE):
        piece = slice(start, start + PIECE)
        part = rounded[: source[piece].size]
        convert(source[piece], part)
        convert(part, into[piece])


def in_wide(ufunc: np.ufunc, a: np.ndarray, b: Any, out: np.ndarray) -> None:
    """Write ``ufunc(a, b)`` into `out`, rounded to its dtype: computed in float32, or in float64 if one is.

    Parameters
    ----------
    a, out : shape (n,), any float dtypes. b : the same, or a number.
    """
    arrays = [x for x in (a, b, out) if isinstance(x, np.ndarray)]
    wide = np.float64 if any(x.dtype == np.float64 for x in arrays) else np.float32
    size = a.size if all(x.dtype == wide for x in arrays) else CAST_PIECE
    for start in range(0, a.size, max(1, size)):
        piece = slice(start, start + size)
        other = b[piece] if isinstance(b, np.ndarray) else wide(b)
        ufunc(a[piece], other, out=out[piece], dtype=wide, casting="unsafe")


def all_finite(x: np.ndarray) -> bool:
    """Return whether no element of `x`, shape (n,), is NaN or infinite; in one pass over most."""
    # A sum is finite only if all its terms are; that it is not may be its own overflow. Squares overflow
    # sooner, but BLAS adds them up three times as fast.
    with np.errstate(over="ignore", invalid="ignore"):
        if x.dtype == np.float32 and np.isfinite(np.dot(x, x)):
            return True
    return all(bool(np.isfinite(x[i : i + PIECE]).all()) for i in range(0, x.size, PIECE))


def describe(precision: Precision) -> dict[str, Any]:
    """Return the dtypes by role, as reports print them."""
    return {
        "params": precision.params,
        "grads": precision.grads,
        "optimizer": "float32",
        "reduce": precision.reduce,
        "gather": precision.gather,
    }
