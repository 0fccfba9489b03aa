"""Batches: the seed's endless stream, and rows of a user's file dealt to ranks.

Not for: what a batch is used for. Both give global batches: a sequence of one (x, y) for each rank.
"""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]

# One rank's part of a global batch: its K micro-batches.
MicroBatches = Sequence[Batch]


class Data(Protocol):
    """Where batches come from."""

    def global_batches(self, size: int) -> Iterator[Sequence[MicroBatches]]:
        """Yield global batches for `size` ranks, the same on every rank; item r is rank r's micro-batches."""

    def fingerprint(self) -> str:
        """Return a text that differs where data differ, to compare between ranks."""


class SeedStream:
    """Standard normal x and y of one generator: x then y, rank by rank, micro-batch by micro-batch; endless.

    Every rank draws all ranks' batches, since the stream is one: N times the work, which is the price of
    one stream that any rank (and the reference) can replay.

    Parameters
    ----------
    seed : of `numpy.random.default_rng`. rows : of each micro-batch. n_in, n_out : columns of x and y.
    accumulate : micro-batches of a rank in a global batch, K.
    """

    def __init__(self, seed: int, rows: int, n_in: int, n_out: int, accumulate: int = 1) -> None:
        self.seed, self.rows, self.n_in, self.n_out = seed, rows, n_in, n_out
        self.accumulate = accumulate

    def fingerprint(self) -> str:
        return f"seed {self.seed}, {self.accumulate} times {self.rows} rows of {self.n_in} and {self.n_out}"

    def global_batches(self, size: int) -> Iterator[Sequence[MicroBatches]]:
        rng = np.random.default_rng(self.seed)

        def draw(columns: int) -> np.ndarray:
            return rng.standard_normal((self.rows, columns)).astype(np.float32)

        while True:
            turns = [
                [(draw(self.n_in), draw(self.n_out)) for _ in range(size)] for _ in range(self.accumulate)
            ]
            yield [[turn[rank] for turn in turns] for rank in range(size)]


class FileRows:
    """Rows of arrays x and y, shuffled anew each epoch and dealt to ranks without overlap.

    Epoch e is shuffled by ``default_rng((seed, e))``. A global batch takes the next size x accumulate x rows
    rows; they are dealt `rows` at a time, rank by rank, micro-batch by micro-batch. An incomplete last global
    batch is dropped; or kept, and dealt in the same order as far as it goes: the last to be dealt to get
    fewer rows, or none.

    Parameters
    ----------
    x, y : float32, shape (n, columns). rows : of each micro-batch. keep_last : keep what is left of an epoch.
    """

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        *,
        seed: int,
        rows: int,
        epochs: int,
        accumulate: int = 1,
        keep_last: bool = False,
    ) -> None:
        self.x, self.y = x, y
        self.seed, self.rows, self.epochs = seed, rows, epochs
        self.accumulate, self.keep_last = accumulate, keep_last

    def fingerprint(self) -> str:
        contents = hashlib.blake2b(digest_size=8)
        for array in (self.x, self.y):
            contents.update(np.ascontiguousarray(array).data)
        return f"{self.x.shape} and {self.y.shape}, contents {contents.hexdigest()}"

    def global_rows(self, size: int) -> int:
        """Return the rows of a whole global batch for `size` ranks."""
        return size * self.accumulate * self.rows

    def steps_per_epoch(self, size: int) -> int:
        """Return the number of global batches in an epoch for `size` ranks."""
        whole, left = divmod(len(self.x), self.global_rows(size))
        return whole + (self.keep_last and left > 0)

    def left_rows(self, size: int) -> int:
        """Return the rows of an epoch's incomplete last global batch: kept, or left out."""
        return len(self.x) % self.global_rows(size)

    def global_batches(self, size: int) -> Iterator[Sequence[MicroBatches]]:
        for epoch in range(self.epochs):
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.x))
            for step in range(self.steps_per_epoch(size)):
                start = step * self.global_rows(size)
                yield _Dealt(self, size, order[start : start + self.global_rows(size)])


class _Dealt(Sequence[MicroBatches]):
    """A global batch as row numbers: a rank copies only the rows it asks for."""

    def __init__(self, source: FileRows, size: int, order: np.ndarray) -> None:
        self._source, self._size, self._order = source, size, order

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < len(self):
            raise IndexError(f"rank: expected 0 to {len(self) - 1}, got {rank}")
        source, rows = self._source, self._source.rows
        starts = [(k * self._size + rank) * rows for k in range(source.accumulate)]
        mine = [self._order[start : start + rows] for start in starts]
        return [(source.x[rows], source.y[rows]) for rows in mine]


def load_npz(path: str | os.PathLike, n_in: int, n_out: int) -> tuple[Batch, str]:
    """Read arrays x and y of an .npz file for a model of `n_in` inputs and `n_out` outputs.

    Returns
    -------
    ((x, y), note) : float32 in C order, shapes (n, n_in) and (n, n_out); the note says what was converted,
        or is empty.

    Raises
    ------
    ValueError : the file or an array is not what it must be; one line that names it.
    OSError : the file cannot be read.
    """
    name = os.fspath(path)
    if not name:
        raise ValueError("data: expected an .npz file, got an empty name")
    if os.path.isdir(name):
        raise ValueError(f"{name}: expected an .npz file, got a directory")
    if os.path.exists(name) and not os.path.isfile(name):
        # Opening a pipe waits for who writes into it.
        raise ValueError(f"{name}: expected an .npz file, got a device or a pipe")
    try:
        with open(name, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise _Bad(f"{name}: expected an .npz file with arrays x and y, got one bare array")
            with archive, warnings.catch_warnings():
                # That Python 2 wrote the file is of no use to know, from every rank.
                warnings.simplefilter("ignore")
                arrays = {key: _read(archive, key, name) for key in ("x", "y")}
    except _Bad:
        raise
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or 'expected an .npz file, got a damaged one'}") from None
    except MemoryError:
        raise ValueError(
            f"{name}: expected arrays that fit into memory, got larger ones, or a damaged file"
        ) from None
    except Exception as error:
        # A damaged archive fails in zipfile, zlib, lzma, numpy's header parser or the allocator, each with
        # an error of its own; all mean the same to who named the file.
        raise ValueError(
            f"{name}: expected an .npz file, got one that is damaged, truncated or of another kind "
            f"({type(error).__name__})"
        ) from None
    converted = [f"{key} {a.dtype} -> float32" for key, a in arrays.items() if a.dtype != np.float32]
    x = _checked(arrays["x"], "x", n_in, "first", name)
    y = _checked(arrays["y"], "y", n_out, "last", name)
    if len(x) != len(y):
        raise ValueError(f"{name}: expected as many rows in y as in x, got {len(x)} in x and {len(y)} in y")
    return (x, y), ", ".join(converted)


class _Bad(ValueError):
    """What is wrong with a file, already in words."""


def _read(archive: np.lib.npyio.NpzFile, key: str, name: str) -> np.ndarray:
    if key not in archive:
        found = ", ".join(archive.files) or "none"
        raise _Bad(f"{name}: expected arrays x and y, got {found}")
    try:
        array = archive[key]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise _Bad(f"{name}: {key}: expected numbers, got Python objects, which are never loaded") from None
    if not isinstance(array, np.ndarray):
        raise _Bad(f"{name}: {key}: expected an array, got bytes that are none")
    return array


def _checked(array: np.ndarray, key: str, columns: int, end: str, name: str) -> np.ndarray:
    if array.ndim != 2 or not len(array):
        raise ValueError(f"{name}: {key}: expected shape (rows, {columns}), got {array.shape}")
    if array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: {key}: expected real numbers, got {array.dtype}")
    if array.shape[1] != columns:
        raise ValueError(
            f"{name}: {key}: expected {columns} columns, the {end} of --dims, got {array.shape[1]}"
        )
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(array, np.float32)
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if bad.size:
        beyond = np.isfinite(array[bad[0]]).all()
        got = "a number beyond float32's range" if beyond else "NaN or infinity"
        raise ValueError(f"{name}: {key}: expected finite float32 numbers, got {got} in row {bad[0]}")
    return rows
