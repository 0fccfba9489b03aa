"""Batches: the document's stream, rows dealt without overlap, and files that are not what they must be."""

import itertools
import zipfile

import numpy as np
import pytest
from conftest import DATA

from zero_mpi.data import FileRows, SeedStream, load_npz


def test_the_stream_is_the_documents():
    rng = np.random.default_rng(7)
    stream = SeedStream(7, 8, 64, 64).global_batches(3)
    for batches in itertools.islice(stream, 4):
        assert len(batches) == 3
        for ((x, y),) in batches:
            assert np.array_equal(x, rng.standard_normal((8, 64)).astype(np.float32))
            assert np.array_equal(y, rng.standard_normal((8, 64)).astype(np.float32))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("n", [15, 60, 61, 74])
def test_rows_are_dealt_without_overlap_and_shuffled_each_epoch(size, n):
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    data = FileRows(x, -x, seed=3, rows=3, epochs=2)
    batches = list(data.global_batches(size))
    per_epoch = n // (3 * size)
    assert len(batches) == 2 * per_epoch == 2 * data.steps_per_epoch(size)
    orders = []
    for epoch in range(2):
        rows = []
        for batch in batches[epoch * per_epoch : (epoch + 1) * per_epoch]:
            assert len(batch) == size
            for ((bx, by),) in batch:
                assert bx.shape == (3, 2) and np.array_equal(by, -bx)
                rows += [int(v) // 2 for v in bx[:, 0]]
        assert len(set(rows)) == len(rows) == n - data.left_rows(size)
        orders.append(rows)
    assert orders[0] != orders[1]
    expected = np.random.default_rng((3, 1)).permutation(n)[: len(orders[1])]
    assert orders[1] == list(expected)


def test_another_seed_is_another_order():
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    orders = []
    for seed in (3, 4):
        data = FileRows(x, x, seed=seed, rows=2, epochs=1)
        orders.append([float(bx[0, 0]) for batch in data.global_batches(2) for ((bx, _),) in batch])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_last_batch_can_be_kept_and_no_row_is_lost(size, accumulate):
    x = np.arange(2 * 31, dtype=np.float32).reshape(31, 2)
    data = FileRows(x, -x, seed=3, rows=4, epochs=1, accumulate=accumulate, keep_last=True)
    batches = list(data.global_batches(size))
    assert len(batches) == data.steps_per_epoch(size) == -(-31 // (4 * size * accumulate))
    rows = []
    for batch in batches:
        assert len(batch) == size and all(len(micro) == accumulate for micro in batch)
        # Dealt rank by rank, micro-batch by micro-batch.
        for k in range(accumulate):
            for rank in range(size):
                bx, by = batch[rank][k]
                assert np.array_equal(by, -bx) and len(bx) <= 4
                rows += [int(v) // 2 for v in bx[:, 0]]
    assert rows == list(np.random.default_rng((3, 0)).permutation(31))


def test_a_rank_that_is_not_there_has_no_batch():
    batch = next(FileRows(np.ones((9, 1)), np.ones((9, 1)), seed=0, rows=3, epochs=1).global_batches(3))
    with pytest.raises(IndexError, match="rank: expected 0 to 2, got 3"):
        batch[3]


def test_digits_load():
    (x, y), note = load_npz(DATA / "digits.npz", 64, 10)
    assert x.shape == (1797, 64) and y.shape == (1797, 10) and note == ""
    assert x.dtype == y.dtype == np.float32


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_integers_are_converted_and_said(tmp_path):
    path = saved(tmp_path / "a.npz", x=np.arange(6).reshape(3, 2), y=np.ones((3, 1), np.float32))
    (x, _), note = load_npz(path, 2, 1)
    assert x.dtype == np.float32 and x.flags.c_contiguous
    assert note == "x int64 -> float32"


ones = np.ones((3, 2), np.float32)
ragged = np.empty(2, object)
ragged[:] = [[1, 2], [3]]
nan = ones.copy()
nan[1, 0] = np.nan
BAD = {
    "arrays x and y, got x": {"x": ones},
    "arrays x and y, got none": {},
    "y: expected shape": {"x": ones, "y": np.ones(3)},
    "x: expected shape": {"x": np.ones((0, 2)), "y": ones},
    "x: expected numbers, got Python objects": {"x": ragged, "y": ones},
    "x: expected real numbers, got complex128": {"x": ones.astype(complex), "y": ones},
    "x: expected real numbers, got <U1": {"x": np.array([["a", "b"]]), "y": ones},
    "x: expected finite float32 numbers, got NaN or infinity in row 1": {"x": nan, "y": ones},
    "y: expected finite float32 numbers, got a number beyond float32's range in row 0": {
        "x": ones,
        "y": ones.astype(float) * 1e300,
    },
    "x: expected 2 columns, the first of --dims, got 3": {"x": np.ones((3, 3)), "y": ones},
    "y: expected 2 columns, the last of --dims, got 1": {"x": ones, "y": np.ones((3, 1))},
    "got 3 in x and 2 in y": {"x": ones, "y": ones[:2]},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_arrays_are_named(tmp_path, words):
    path = saved(tmp_path / "bad.npz", **BAD[words])
    with pytest.raises(ValueError) as caught:
        load_npz(path, 2, 2)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def write_truncated(path):
    whole = (DATA / "digits.npz").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


FILES = {
    "No such file": lambda path: None,
    "got a directory": lambda path: path.mkdir(),
    "is damaged, truncated": write_truncated,
    "or of another kind": lambda path: path.write_text("x y"),
    "got one that is damaged": lambda path: path.write_bytes(b""),
    "one bare array": lambda path: np.save(path.open("wb"), ones),
}


def test_a_member_that_is_no_array_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "file.npz", "w") as archive:
        archive.writestr("x", b"bytes")
        archive.writestr("y", b"bytes")
    with pytest.raises(ValueError, match="x: expected an array, got bytes"):
        load_npz(tmp_path / "file.npz", 64, 10)


@pytest.mark.parametrize("compressed", [False, True])
def test_no_flipped_byte_is_a_traceback(tmp_path, compressed):
    x, y = np.arange(60, dtype=np.float32).reshape(6, 10), np.ones((6, 2), np.float32)
    path = tmp_path / "file.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=x, y=y)
    whole = path.read_bytes()
    refused = 0
    for i in range(0, len(whole), 3):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x55]) + whole[i + 1 :])
        try:
            load_npz(path, 10, 2)
        except ValueError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            refused += 1
    assert refused > len(whole) / 6


@pytest.mark.parametrize("words", FILES)
def test_files_that_are_no_npz_are_named(tmp_path, words):
    path = tmp_path / "file.npz"
    FILES[words](path)
    with pytest.raises(ValueError) as caught:
        load_npz(path, 64, 10)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_fingerprints_differ_where_any_of_the_data_does():
    x, y = np.ones((4, 2), np.float32), np.ones((4, 3), np.float32)
    other = y.copy()
    other[3, 2] = 2
    files = [FileRows(x, rows, seed=0, rows=1, epochs=1).fingerprint() for rows in (y, other)]
    streams = [SeedStream(*given).fingerprint() for given in itertools.product((1, 2), repeat=5)]
    assert len(set(files)) == 2 and len(set(streams)) == 32
