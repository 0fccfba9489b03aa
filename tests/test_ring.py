"""Rings over threads: exact sums, the order of summation, what is sent, what is refused."""

import numpy as np
import pytest
from threadworld import run_ranks

from zero_mpi import formulas, reducers, ring
from zero_mpi.layout import Blocks
from zero_mpi.memory import Ledger
from zero_mpi.precision import dtype_of

SIZES = [1, 2, 3, 4, 5, 7, 8, 17]
LENGTHS = [0, 1, 2, 3, 16, 17, 40, 257]
DTYPES = ["float64", "float32", "float16", "bfloat16"]


def integers(rank, n, dtype):
    """Return numbers that differ by rank and index, and whose sums over 17 ranks bfloat16 holds exactly."""
    return ((np.arange(n) * 7 + rank * 3) % 8).astype(dtype_of(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_sums_and_counts_exactly(size, n, dtype):
    expected = sum(integers(r, n, "float64") for r in range(size))

    def work(comm):
        own = ring.reduce_scatter(comm, integers(comm.rank, n, dtype))
        assert own.dtype == dtype_of(dtype)
        assert np.array_equal(own.astype(np.float64), expected[Blocks(n, size).of(comm.rank)])
        return comm.traffic.total(traffic="model", collective="reduce-scatter")

    counts = run_ranks(size, work)
    item = dtype_of(dtype).itemsize
    assert [c.sent_bytes for c in counts] == [
        item * sum(formulas.reduce_scatter_sent(n, size, r)) for r in range(size)
    ]
    assert sum(c.sent_bytes for c in counts) == sum(c.received_bytes for c in counts) == (size - 1) * n * item
    assert {c.sent_messages for c in counts} == {c.received_messages for c in counts} == {size - 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_fills_every_block_and_counts_exactly(size, n, dtype):
    whole = integers(5, n, dtype)

    def work(comm):
        own = Blocks(n, size).of(comm.rank)
        x = np.full(n, 99, dtype_of(dtype))
        x[own] = whole[own]
        ring.all_gather(comm, x)
        assert x.tobytes() == whole.tobytes()
        return comm.traffic.total(traffic="model", collective="all-gather")

    counts = run_ranks(size, work)
    item = dtype_of(dtype).itemsize
    assert [c.sent_bytes for c in counts] == [
        item * sum(formulas.all_gather_sent(n, size, r)) for r in range(size)
    ]
    assert sum(c.sent_bytes for c in counts) == sum(c.received_bytes for c in counts) == (size - 1) * n * item


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_applies_finish_once_on_the_owner(size):
    def work(comm):
        x = integers(comm.rank, 40, "float32")
        calls = []

        def finish(own):
            calls.append(own.size)
            own *= 2

        ring.all_reduce(comm, x, finish)
        assert calls == [Blocks(40, size).size(comm.rank)]
        return x

    expected = 2 * sum(integers(r, 40, "float32") for r in range(size))
    assert all(np.array_equal(x, expected) for x in run_ranks(size, work))


@pytest.mark.parametrize("size", [3, 5, 8])
def test_block_b_is_summed_in_rank_order_from_b_plus_one(size):
    n = 50
    xs = [np.random.default_rng(r).standard_normal(n).astype(np.float32) for r in range(size)]
    owns = run_ranks(size, lambda comm: ring.reduce_scatter(comm, xs[comm.rank].copy()))
    in_rank_order = []
    for b in range(size):
        block = Blocks(n, size).of(b)
        total = xs[(b + 1) % size][block]
        for i in range(2, size + 1):
            total = total + xs[(b + i) % size][block]
        assert owns[b].tobytes() == total.tobytes()
        in_rank_order.append(sum((x[block] for x in xs[1:]), xs[0][block]))
    # The data can tell orders apart: the plain order 0, 1, 2, ... gives other bits.
    assert np.concatenate(owns).tobytes() != np.concatenate(in_rank_order).tobytes()


@pytest.mark.parametrize("limit", [1, 3, 64, 2**30])
def test_long_messages_are_cut_and_arrive_whole(limit):
    def work(comm):
        x = integers(comm.rank, 41, "float32")
        ring.all_reduce(comm, x)
        return x, comm.traffic.total(traffic="model")

    results = run_ranks(3, work, max_message_bytes=limit)
    expected = sum(integers(r, 41, "float32") for r in range(3))
    for rank, (x, count) in enumerate(results):
        assert np.array_equal(x, expected)
        sizes = [Blocks(41, 3).size(b) * 4 for b in range(3)]
        sent = [s for b, s in enumerate(sizes) if b != rank] + [
            s for b, s in enumerate(sizes) if b != (rank + 1) % 3
        ]
        assert count.sent_bytes == sum(sent)
        assert count.sent_messages == sum(-(-s // limit) for s in sent)


def test_the_ring_allocates_one_block_and_nothing_in_its_loop():
    allocated = []

    def empty(numel, dtype):
        allocated.append(numel)
        return np.empty(numel, dtype)

    run_ranks(4, lambda comm: ring.all_reduce(comm, np.ones(41, np.float32), None, empty))
    assert sorted(allocated) == [11] * 4


REFUSED = {
    "Fortran-ordered": lambda: np.asfortranarray(np.ones((4, 6), np.float32)),
    "non-contiguous": lambda: np.ones(12, np.float32)[::2],
    "C-ordered": lambda: np.ones((4, 6), np.float32),
}


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_byte_is_refused(limit):
    with pytest.raises(ValueError, match="^max_message_bytes: expected at least 1, got"):
        run_ranks(1, lambda comm: None, max_message_bytes=limit)


def test_what_a_rank_receives_is_counted_from_whom_it_came():
    def work(comm):
        ring.reduce_scatter(comm, np.ones(41, np.float32))
        left, right = (comm.rank - 1) % 3, (comm.rank + 1) % 3
        return [comm.traffic.total(peer=peer)[3:] for peer in (left, right)]

    for rank, (left, right) in enumerate(run_ranks(3, work, max_message_bytes=20)):
        sizes = [4 * Blocks(41, 3).size(b) for b in range(3) if b != (rank - 1) % 3]
        assert left == (sum(sizes), sum(-(-size // 20) for size in sizes))
        assert right == (0, 0)


@pytest.mark.parametrize("collective", [ring.reduce_scatter, ring.all_gather, ring.all_reduce])
@pytest.mark.parametrize("name", REFUSED)
def test_arrays_of_another_order_are_refused_by_name(collective, name):
    with pytest.raises(ValueError, match=f"^x: .* a {name} one .*rank 0"):
        run_ranks(1, lambda comm: collective(comm, REFUSED[name]()))


@pytest.mark.parametrize("collective", [ring.reduce_scatter, ring.all_gather, ring.all_reduce])
def test_read_only_arrays_are_refused_by_name(collective):
    x = np.ones(4, np.float32)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        run_ranks(1, lambda comm: collective(comm, x))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("collective", [ring.reduce_scatter, ring.all_gather, ring.all_reduce])
def test_what_is_no_array_of_numbers_is_refused_by_name(collective, size):
    for x, what in (
        ([1.0, 2.0], "list"),
        (np.float32(1), "float32"),
        (None, "NoneType"),
        (np.array([{}, {}, {}], object), "an array of Python objects"),
    ):
        with pytest.raises(TypeError, match=f"^x: expected a numpy array of numbers, got {what} "):
            run_ranks(size, lambda comm, x=x: collective(comm, x))


@pytest.mark.parametrize("name", ["Fortran-ordered", "non-contiguous"])
@pytest.mark.parametrize("which", ["send", "receive"])
def test_sendrecv_refuses_them_too(which, name):
    def work(comm):
        buffers = {
            "send": np.ones(24, np.float32),
            "receive": np.ones(24, np.float32),
            which: REFUSED[name](),
        }
        comm.sendrecv(buffers["send"], 0, buffers["receive"], 0)

    with pytest.raises(ValueError, match=f"^{which}: expected a C-contiguous array, got a {name}"):
        run_ranks(1, work)


def test_sendrecv_refuses_a_read_only_receive_buffer():
    received = np.ones(4, np.float32)
    received.flags.writeable = False
    with pytest.raises(ValueError, match="^receive: .*read-only"):
        run_ranks(1, lambda comm: comm.sendrecv(np.ones(4, np.float32), 0, received, 0))


def test_case_units_in_another_order_on_one_rank_are_named():
    def work(comm):
        reducer = reducers.Ring(comm, Ledger())
        for u in (0, 1) if comm.rank == 1 else (1, 0):
            reducer.reduce_scatter(u, np.ones((40, 18)[u], np.float32))

    with pytest.raises(
        RuntimeError, match="different orders: rank . is at .* of unit ., rank . at .* of unit ."
    ):
        run_ranks(3, work)


def test_a_block_of_another_size_on_one_rank_is_named():
    def work(comm):
        ring.all_gather(comm, np.ones(9 if comm.rank == 1 else 6, np.float32))

    with pytest.raises(RuntimeError, match="blocks differ between ranks in all-gather of unit 0"):
        run_ranks(3, work)
    with pytest.raises(RuntimeError, match="blocks differ between ranks in all-gather of unit 0"):
        run_ranks(3, work, max_message_bytes=5)
