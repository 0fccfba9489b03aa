"""The benchmark: nccl-tests' columns and conventions, verified results, the library's own collectives.

Not for: times. They are printed, never asserted.
"""

import json
import re

import numpy as np
import pytest
from threadworld import run_ranks

from zero_mpi import arguments, bench, ring
from zero_mpi.comm import Communicator
from zero_mpi.layout import Blocks
from zero_mpi.precision import dtype_of

TITLES = "size count type redop root by time p5 p95 algbw busbw #wrong ratio"
OPERATION = {operation.name: operation for operation in bench.OPERATIONS}


def row(operation="all_reduce", size=4, **numbers):
    """Return a row as `measure` does: 1 MiB in 100 us against the library's 200 us."""
    factor = OPERATION[operation].busbw_factor(size)
    each = {
        by: {
            "time_us": time_us,
            "p5_us": time_us / 2,
            "p95_us": time_us * 2,
            "algbw_gb_per_s": 2**20 / time_us / 1e3,
            "busbw_gb_per_s": 2**20 / time_us / 1e3 * factor,
            "wrong": 0,
        }
        for by, time_us in (("ours", 100.0), ("library", 200.0))
    }
    return {
        "operation": operation,
        "size_bytes": 2**20,
        "count": 2**18,
        "dtype": "float32",
        "redop": "sum",
        "root": -1,
        "busbw_factor": factor,
        "ratio": 0.5,
        **each,
        **numbers,
    }


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name, factor", [("reduce_scatter", 1), ("all_gather", 1), ("all_reduce", 2)])
def test_busbw_factors_are_those_of_nccl_tests(name, factor, n):
    assert OPERATION[name].busbw_factor(n) == pytest.approx(factor * (n - 1) / n)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_size_is_of_a_buffer_or_of_the_whole_in_equal_blocks(n):
    assert OPERATION["all_reduce"].numel(4096, 4, n) == 1024
    for name in ("reduce_scatter", "all_gather"):
        numel = OPERATION[name].numel(4096, 4, n)
        assert numel % n == 0 and 1024 - n < numel <= 1024


def test_the_columns_are_nccl_tests_own_with_units_below():
    comment, operation, titles, units = bench.heading("all_reduce")
    assert (comment, operation) == ("#", "# all_reduce")
    assert titles.startswith("#") and " ".join(titles[1:].split()) == TITLES
    assert units.startswith("#")
    assert " ".join(units[1:].split()) == "(B) (elements) (us) (us) (us) (GB/s) (GB/s)"
    lines = bench.lines_of(row())
    ours, library = (" ".join(line.split()) for line in lines)
    assert ours == "1048576 262144 float sum -1 ours 100.00 50.00 200.00 10.49 15.73 0 0.50"
    assert library == "1048576 262144 float sum -1 library 200.00 100.00 400.00 5.24 7.86 0"
    # Right-aligned: a column's cells end where its title does.
    assert titles.index("ratio") + 5 == len(lines[0]) == len(titles) <= 100


def test_one_rank_has_no_times():
    alone = row(ours=None, library=None, ratio=None)
    assert bench.lines_of(alone)[0].split()[-7:] == ["n/a"] * 7
    nothing = dict.fromkeys(OPERATION)
    counting = {"percent": nothing, "noise_percent": nothing}
    closing = "\n".join(bench.closing({"rows": [alone], "counting": counting}))
    assert "average" not in closing and "OK" not in closing and "all_reduce n/a" in closing


@pytest.mark.parametrize("text, nbytes", [("4096", 4096), ("4K", 4096), ("64m", 2**26), ("2G", 2**31)])
def test_sizes_are_written_as_for_nccl_tests(text, nbytes):
    assert arguments.byte_size(text) == nbytes


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--min-bytes", "4Q"], "--min-bytes: expected bytes such as 4096, 64K or 64M, got '4Q'"),
        (["--max-bytes", "0"], "--max-bytes: expected bytes"),
        (["--repeats", "0"], "--repeats: expected a whole number from 1 to 1000000, got '0'"),
        (["--dtype", "bfloat16"], "--dtype: invalid choice: 'bfloat16'"),
        (["--min-bytes", "8"], "--min-bytes: expected at least 12, one element a rank, got 8"),
        (["--max-bytes", "1K"], "--max-bytes: expected at least --min-bytes, 4096, got 1024"),
        (["--max-bytes", "8G"], "--max-bytes: expected at most 8589934588, 2^31 - 1 elements"),
        (["--steps", "3"], "unrecognized arguments: --steps 3"),
    ],
)
def test_a_mistake_is_named(argv, words):
    with pytest.raises(ValueError) as caught:
        bench.sizes(bench.parser().parse_args(argv), 3)
    assert words in str(caught.value)


def test_sizes_grow_by_four_from_4_kib_to_64_mib():
    assert bench.sizes(bench.parser().parse_args([]), 2) == [2**k for k in range(12, 27, 2)]


def test_help_fits_a_screen():
    lines = bench.parser().format_help().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_the_uncounted_ring_does_the_same_and_counts_nothing():
    def work(comm):
        uncounted = bench._Uncounted(comm.transport, max_message_bytes=7)
        x = np.arange(41, dtype=np.float32) * (comm.rank + 1)
        ring.all_reduce(uncounted, x)
        assert np.array_equal(x, np.arange(41) * 6)
        return uncounted.traffic.total().sent_messages

    assert run_ranks(3, work) == [0, 0, 0]


# The library's own collectives.


def test_a_transport_without_mpi_says_so():
    with pytest.raises(ValueError, match="^library all-reduce: expected MPI, got threads below it"):
        run_ranks(2, lambda comm: comm.library_all_reduce(np.ones(4, np.float32)))


@pytest.mark.mpi
@pytest.mark.parametrize("numel", [0, 1, 7, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_library_sums_in_the_same_blocks_and_is_counted_as_calls(comm, dtype, numel):
    xs = [((np.arange(numel) * 7 + r * 3) % 8).astype(dtype) for r in range(comm.size)]
    total = sum(xs)
    mine = Blocks(numel, comm.size).of(comm.rank)
    own, x = np.empty(total[mine].size, dtype), xs[comm.rank].copy()
    comm.library_reduce_scatter(x, own)
    assert np.array_equal(own, total[mine]) and np.array_equal(x, xs[comm.rank])
    comm.library_all_reduce(x)
    assert np.array_equal(x, total)
    comm.library_all_reduce(x)
    assert comm.traffic.calls == {"reduce-scatter": 1, "all-reduce": 2}
    assert comm.traffic.total().sent_messages == comm.traffic.total().sent_bytes == 0


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16", "float32", "float64"])
def test_the_library_gathers_any_dtype_in_place(comm, dtype):
    whole = (np.arange(41) % 8).astype(dtype_of(dtype) if "float" in dtype else dtype)
    x = np.full_like(whole, 9)
    mine = Blocks(41, comm.size).of(comm.rank)
    x[mine] = whole[mine]
    comm.library_all_gather(x)
    assert x.tobytes() == whole.tobytes()
    assert comm.traffic.calls == {"all-gather": 1}


@pytest.mark.mpi
def test_the_library_refuses_what_mpi_cannot_do(comm):
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(ValueError, match=f"^x: the MPI library sums float32 and float64, got {dtype}$"):
            comm.library_all_reduce(np.ones(4, dtype_of(dtype)))
    with pytest.raises(ValueError, match="^own: expected a contiguous array of shape"):
        comm.library_reduce_scatter(np.ones(8, np.float32), np.ones(9, np.float32))
    with pytest.raises(ValueError, match="^own: .* float32, got .* float64"):
        own = np.ones(Blocks(8, comm.size).size(comm.rank))
        comm.library_reduce_scatter(np.ones(8, np.float32), own)
    with pytest.raises(ValueError, match="^x: expected a contiguous array of shape \\(n,\\)"):
        comm.library_all_gather(np.ones((4, 4), np.float32))
    with pytest.raises(ValueError, match="^x: expected elements of 1, 2, 4 or 8 bytes, got 16"):
        comm.library_all_gather(np.ones(8, np.complex128))
    # Never touched: takes no memory.
    with pytest.raises(ValueError, match="at most 2147483647 elements, got 2147483648"):
        comm.library_all_gather(np.empty(2**31, np.int8))
    assert not comm.traffic.calls


# Patience: sends that are waited for at the end of a collective.


@pytest.mark.mpi
@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("numel", [5, 300_000])
def test_rings_are_exact_whether_or_not_sends_are_deferred(numel, crowded):
    comm = Communicator()
    comm.transport.defers_sends = comm.defers_sends = crowded
    xs = [(np.arange(numel, dtype=np.float32) * (r + 1)) % 64 for r in range(comm.size)]
    for _ in range(5):
        x = xs[comm.rank].copy()
        ring.all_reduce(comm, x)
        # Changed at once: what was sent must be out when the collective ends.
        result, x[...] = x.copy(), -1
        assert np.array_equal(result, sum(xs))
    assert comm.transport._deferred is None
    comm.free()


@pytest.mark.mpi(min_size=2)
def test_a_collective_inside_the_same_collective_ends_as_it_began(comm):
    outside = comm._now
    x, y = np.full(4, comm.rank, np.int64), np.empty(4, np.int64)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.collective("all-gather") as _, comm.collective("all-gather"):
        comm.sendrecv(x, right, y, left)
    assert comm._now is outside
    assert comm.traffic.total(collective="all-gather").sent_messages == 1


# Whole runs.


@pytest.mark.mpi(min_size=2)
def test_a_run_is_exact_and_a_wrong_result_is_counted(comm, monkeypatch, capsys):
    argv = ["--max-bytes", "16K", "--repeats", "2"]
    assert bench.main(comm, argv) == 0
    gather = ring.all_gather

    def spoiled(comm, x):
        gather(comm, x)
        if comm.rank == comm.size - 1:
            x[3] += 1

    capsys.readouterr()
    monkeypatch.setattr(ring, "all_gather", spoiled)
    assert bench.main(comm, argv) == 1
    if comm.rank == 0:
        out = capsys.readouterr().out
        # Two sizes, verified before and after they are timed.
        assert "# wrong values: 4 FAILED" in out
        wrong = {
            (line.split()[3], line.split()[5]): int(line.split()[11])
            for line in out.splitlines()
            if not line.startswith("#")
        }
        assert wrong == {
            ("sum", "ours"): 0,
            ("sum", "library"): 0,
            ("none", "ours"): 2,
            ("none", "library"): 0,
        }


@pytest.mark.launches
@pytest.mark.parametrize("n", [1, 3])
def test_a_job_prints_a_table_and_writes_json(launch, tmp_path, n):
    path = tmp_path / "bench.json"
    argv = ["--min-bytes", "4K", "--max-bytes", "16K", "--repeats", "3", "--json", path]
    job = launch(n, "-m", "zero_mpi", "bench", *argv)
    assert job.code == 0, job.err
    rows = [line.split() for line in job.out.splitlines() if not line.startswith("#")]
    assert len(rows) == 3 * 2 * 2
    assert max(map(len, job.out.splitlines())) <= 100
    result = json.loads(path.read_text())
    assert result["schema"] == "zero_mpi.bench/1" and result["exit_code"] == 0
    assert result["environment"]["ranks"] == n
    for i, numbers in enumerate(result["rows"]):
        assert rows[2 * i][0] == rows[2 * i + 1][0] == str(numbers["size_bytes"])
        blocks = n if numbers["operation"] != "all_reduce" else 1
        assert numbers["size_bytes"] == numbers["count"] * 4 * blocks
        if n == 1:
            assert rows[2 * i][6:] == ["n/a"] * 7
            assert numbers["ours"] is None
            continue
        for by in ("ours", "library"):
            one = numbers[by]
            assert one["p5_us"] <= one["time_us"] <= one["p95_us"]
            assert one["algbw_gb_per_s"] == pytest.approx(numbers["size_bytes"] / one["time_us"] / 1e3)
            assert one["busbw_gb_per_s"] == pytest.approx(one["algbw_gb_per_s"] * numbers["busbw_factor"])
            assert one["wrong"] == 0
    assert re.search("# counting at 1 MiB", job.out)
    assert all((cost is None) == (n == 1) for cost in result["counting"]["percent"].values())


@pytest.mark.launches
@pytest.mark.parametrize(
    "argv, words",
    [
        (["--dtype", "float16"], "--dtype: invalid choice: 'float16'"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(launch, argv, words):
    job = launch(2, "-m", "zero_mpi", "bench", *argv)
    assert job.code == 2
    assert len(job.complaints) == 1 and words in job.complaints[0]
    assert job.out == ""


@pytest.mark.launches
def test_help_is_the_benchmarks_own_and_said_once(launch):
    job = launch(2, "-m", "zero_mpi", "bench", "--help")
    assert job.code == 0 and job.out.count("--min-bytes") == 1
