"""Bench: the ring's collectives timed in turn with the MPI library's own, in nccl-tests' columns.

Not for: counting or training. Nothing here says which is right, only how long each takes.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from . import report, ring
from .arguments import Parser, byte_size, whole
from .comm import LIBRARY_SUMS, MAX_LIBRARY_NUMEL, Communicator
from .fit import physical_bytes, refuse_more_than_fits
from .layout import Blocks

SCHEMA = "zero_mpi.bench/1"

# Sizes grow by this factor, as with nccl-tests' -f 4.
STEP_FACTOR = 4

# Short calls are timed several at a time, as nccl-tests does: a clock takes as long as a short message.
BATCH_BYTES = 2**18
MOST_CALLS = 20

# Counting costs little beside the noise of a shared machine: it is measured with so many times the repeats.
COUNTING_BYTES = 2**20
COUNTING_REPEATS = 10

# What a case holds of a vector's size, at least: x, what it starts as, and the exact result.
WHOLE_VECTORS = 3

# A prime, so that a block in another's place shows: blocks of the sizes measured are no multiples of it.
PATTERN_LENGTH = 1009

HELP_AFTER = """\
columns, as nccl-tests prints them (1 GB = 1e9 B):
  size    bytes of a rank's buffer; of the whole for reduce_scatter, all_gather
  count   elements of size; of one rank's block for those two
  time    of a call: median over repeats of the slowest rank; p5 and p95 beside
  algbw   size / time
  busbw   algbw x 2(n-1)/n for all_reduce, (n-1)/n for those two
  #wrong  elements that differ from the exact result, all ranks
  ratio   time of ours / time of the library's own call
"""


class Operation(NamedTuple):
    """A collective under nccl-tests' name.

    Fields
    ----------
    name, redop : as nccl-tests prints them.
    library : the library's collective, as `Communicator.library_call` names it.
    passes : times the vector goes around: busbw is algbw x passes (n-1)/n.
    by_block : whether `count` is of a rank's block, so that a size must be a multiple of n blocks.
    """

    name: str
    library: str
    redop: str
    passes: int
    by_block: bool

    def numel(self, nbytes: int, itemsize: int, size: int) -> int:
        """Return the elements of the whole vector that has at most `nbytes`, in equal blocks if by block."""
        numel = nbytes // itemsize
        return numel - numel % size if self.by_block else numel

    def busbw_factor(self, size: int) -> float:
        """Return busbw / algbw; it never depends on the algorithm."""
        return self.passes * (size - 1) / size


OPERATIONS = (
    Operation("reduce_scatter", "reduce-scatter", "sum", 1, True),
    Operation("all_gather", "all-gather", "none", 1, True),
    Operation("all_reduce", "all-reduce", "sum", 2, False),
)


class Case:
    """One operation on one size: the arrays, ours and the library's call on them, and the exact result.

    Every array is written before it is timed. Ours and the library work in the same `x`.

    Parameters
    ----------
    numel : elements of the whole vector.
    """

    def __init__(self, comm: Communicator, operation: Operation, numel: int, dtype: str) -> None:
        self.comm, self.operation, self.numel = comm, operation, numel
        blocks = Blocks(numel, comm.size)
        self._own = blocks.of(comm.rank)
        self.x = np.zeros(numel, dtype)
        self.x[...] = 0
        self._buffer = np.full(blocks.largest, 1, dtype)
        self._library_own = np.full(blocks.size(comm.rank), 1, dtype)
        summed = operation.redop == "sum"
        patterns = [self._pattern(rank) for rank in (range(comm.size) if summed else [0])]
        self._start = np.resize(patterns[comm.rank if summed else 0], numel).astype(dtype)
        self._expected = np.resize(sum(patterns), numel).astype(dtype)
        if not summed:
            self._start[: self._own.start] = self._start[self._own.stop :] = -1
        self.library = comm.library_call(operation.library, self.x, self._library_own)

    def ours(self, comm: Communicator | None = None) -> np.ndarray:
        """Run the ring, on `comm` if given; return the sum of this rank's block (reduce_scatter), or x."""
        comm = comm or self.comm
        if self.operation.name == "reduce_scatter":
            return ring.reduce_scatter(comm, self.x, self._kept_buffer)
        if self.operation.name == "all_gather":
            ring.all_gather(comm, self.x)
        else:
            ring.all_reduce(comm, self.x, None, self._kept_buffer)
        return self.x

    def wrong(self) -> tuple[int, int]:
        """Run ours and the library's once; return how many elements each got wrong here. Collective."""
        expected = self._expected
        if self.operation.name == "reduce_scatter":
            expected = expected[self._own]
        self.x[...] = self._start
        ours = int(np.count_nonzero(self.ours() != expected))
        self.x[...] = self._start
        self.library()
        result = self._library_own if self.operation.name == "reduce_scatter" else self.x
        return ours, int(np.count_nonzero(result != expected))

    def rest(self) -> None:
        """Fill x with zeros: a sum of zeros takes as long as any, and can be repeated for ever."""
        self.x[...] = 0

    def _kept_buffer(self, numel: int, dtype: np.dtype) -> np.ndarray:
        return self._buffer[:numel]

    @staticmethod
    def _pattern(rank: int) -> np.ndarray:
        """Return whole numbers below 8: their sums over ranks are exact in float32."""
        return (np.arange(PATTERN_LENGTH) * 7 + rank * 3) % 8


class _Uncounted(Communicator):
    """The same ranks, messages and checks without the counting: to time what counting costs."""

    def sendrecv(self, send: np.ndarray, dest: int | None, receive: np.ndarray, source: int | None) -> None:
        if not (send.flags.c_contiguous and receive.flags.c_contiguous and receive.flags.writeable):
            self._refuse_buffers(send, receive)
        in_bytes = receive.nbytes
        if send.nbytes > self.max_message_bytes or in_bytes > self.max_message_bytes:
            self._exchange_in_pieces(send, dest, receive, source)
            return
        expected = self._now.tag
        tag, length = self.transport.exchange(send, dest, expected, receive, source)
        if source is not None and (length != in_bytes or tag != expected):
            self._refuse_message(source, tag, length, in_bytes)


def in_turn(
    comm: Communicator, functions: Sequence[Callable[[], Any]], repeats: int, calls: int
) -> np.ndarray:
    """Time functions in turn; return the seconds of a call on the slowest rank, shape (functions, repeats).

    Collective. Each repeat times a batch of `calls` of each function, and each next repeat begins with the
    next function; ranks meet before each batch. The first repeat warms up and is left out.
    """
    meet = comm.library_call("all-reduce", np.zeros(1))
    mine = np.empty((len(functions), repeats + 1))
    for repeat in range(repeats + 1):
        for turn in range(len(functions)):
            which = (repeat + turn) % len(functions)
            function = functions[which]
            meet()
            began = time.perf_counter()
            for _ in range(calls):
                function()
            mine[which, repeat] = (time.perf_counter() - began) / calls
    rows = comm.allgather_bytes(mine[:, 1:].tobytes())
    return np.max([np.frombuffer(row).reshape(len(functions), repeats) for row in rows], axis=0)


def measure(
    comm: Communicator, operation: Operation, nbytes: int, dtype: str, repeats: int
) -> dict[str, Any]:
    """Return the row of one operation and size, without times on one rank. Collective."""
    itemsize = np.dtype(dtype).itemsize
    numel = operation.numel(nbytes, itemsize, comm.size)
    row: dict[str, Any] = {
        "operation": operation.name,
        "size_bytes": numel * itemsize,
        "count": numel // comm.size if operation.by_block else numel,
        "dtype": dtype,
        "redop": operation.redop,
        "root": -1,
        "busbw_factor": operation.busbw_factor(comm.size),
        "calls": max(1, min(MOST_CALLS, BATCH_BYTES // max(1, nbytes))),
        "ours": None,
        "library": None,
        "ratio": None,
    }
    if comm.size == 1:
        return row
    case = Case(comm, operation, numel, dtype)
    before = case.wrong()
    case.rest()
    times = in_turn(comm, [case.ours, case.library], repeats, row["calls"])
    each = comm.allgather_object([*before, *case.wrong()])
    wrong = [sum(counts[i] + counts[i + 2] for counts in each) for i in (0, 1)]
    for by, series, bad in zip(("ours", "library"), times, wrong, strict=True):
        p5, median, p95 = np.percentile(series, [5, 50, 95])
        algbw = row["size_bytes"] / median / 1e9
        row[by] = {
            "time_us": median * 1e6,
            "p5_us": p5 * 1e6,
            "p95_us": p95 * 1e6,
            "algbw_gb_per_s": algbw,
            "busbw_gb_per_s": algbw * row["busbw_factor"],
            "wrong": bad,
        }
    row["ratio"] = row["ours"]["time_us"] / row["library"]["time_us"]
    return row


def counting_cost(comm: Communicator, dtype: str, repeats: int) -> dict[str, Any]:
    """Return what counting adds to the ring's time at 1 MiB, in percent, by operation. Collective.

    The same ring on the same ranks with counting and without, each twice, in turn: the median over repeats
    of their ratio within a repeat, which the machine's change of pace does not touch. The two without it
    should be equal: how far they are not is the noise of the measurement.
    """
    percent: dict[str, float | None] = {operation.name: None for operation in OPERATIONS}
    noise = dict(percent)
    repeats *= COUNTING_REPEATS
    for operation in OPERATIONS if comm.size > 1 else ():
        numel = operation.numel(COUNTING_BYTES, np.dtype(dtype).itemsize, comm.size)
        case = Case(comm, operation, numel, dtype)
        communicators = [make(comm.transport) for make in (Communicator, _Uncounted) * 2]
        times = in_turn(comm, [partial(case.ours, each) for each in communicators], repeats, 1)
        cost = (times[0] + times[2]) / (times[1] + times[3])
        percent[operation.name] = float(np.median(cost) - 1) * 100
        noise[operation.name] = float(np.median(times[1] / times[3]) - 1) * 100
    return {"size_bytes": COUNTING_BYTES, "repeats": repeats, "percent": percent, "noise_percent": noise}


# What is printed.

# Title, unit and width.
_COLUMNS = [
    ("size", "(B)", 9),
    ("count", "(elements)", 10),
    ("type", "", 6),
    ("redop", "", 5),
    ("root", "", 4),
    ("by", "", 7),
    ("time", "(us)", 7),
    ("p5", "(us)", 7),
    ("p95", "(us)", 7),
    ("algbw", "(GB/s)", 6),
    ("busbw", "(GB/s)", 6),
    ("#wrong", "", 6),
    ("ratio", "", 5),
]
_TYPES = {"float32": "float", "float64": "double"}


def heading(operation: str) -> list[str]:
    """Return the comment lines above the rows of an operation."""
    titles, units = [title for title, _, _ in _COLUMNS], [unit for _, unit, _ in _COLUMNS]
    return ["#", f"# {operation}", *("#" + _line(cells)[1:] for cells in (titles, units))]


def lines_of(row: dict[str, Any]) -> list[str]:
    """Return the two lines of a row: ours, then the library's."""
    same = [str(row["size_bytes"]), str(row["count"]), _TYPES[row["dtype"]], row["redop"], str(row["root"])]
    lines = []
    for by in ("ours", "library"):
        numbers = row[by]
        if numbers is None:
            cells = ["n/a"] * 6
        else:
            times = [_us(numbers[key]) for key in ("time_us", "p5_us", "p95_us")]
            speeds = [f"{numbers[key]:.2f}" for key in ("algbw_gb_per_s", "busbw_gb_per_s")]
            cells = [*times, *speeds, str(numbers["wrong"])]
        ratio = "" if by == "library" else "n/a" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(_line([*same, by, *cells, ratio]))
    return lines


def closing(result: dict[str, Any]) -> list[str]:
    """Return the comment lines below all rows: what was wrong, averages, the cost of counting."""
    timed = [row for row in result["rows"] if row["ours"] is not None]
    wrong = sum(row[by]["wrong"] for row in timed for by in ("ours", "library"))
    lines = ["#"]
    if timed:
        lines.append(f"# wrong values: {wrong} {'FAILED' if wrong else 'OK'}")
        means = [np.mean([row[by]["busbw_gb_per_s"] for row in timed]) for by in ("ours", "library")]
        lines.append(f"# average busbw: {means[0]:.3f} GB/s ours, {means[1]:.3f} GB/s library")
    else:
        lines.append("# one rank sends nothing: no times, nothing to verify")
    costs, noise = result["counting"]["percent"], result["counting"]["noise_percent"]
    each = [
        f"{name} " + ("n/a" if cost is None else f"{cost:+.1f} % ({noise[name]:+.1f} %)")
        for name, cost in costs.items()
    ]
    return [
        *lines,
        "# counting at 1 MiB, share of the ring's time (in brackets: the same ring against itself):",
        f"#   {', '.join(each)}",
    ]


def _line(cells: Sequence[str]) -> str:
    padded = [cell.rjust(width) for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True)]
    return " ".join(padded).rstrip()


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


# The command line.


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments after `bench`."""
    p = Parser(
        prog="python -m zero_mpi bench",
        usage="mpiexec -n N python -m zero_mpi bench [options]",
        description="Time reduce-scatter, all-gather and all-reduce: our ring and the MPI library's\n"
        "own call, in turn in one run, each result verified.",
        epilog=HELP_AFTER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--min-bytes", type=byte_size, default=2**12, metavar="B", help="smallest size [4K]")
    p.add_argument("--max-bytes", type=byte_size, default=2**26, metavar="B", help="largest size [64M]")
    repeats = partial(whole, least=1, most=10**6)
    p.add_argument("--repeats", type=repeats, default=25, metavar="R", help="timings of each [25]")
    p.add_argument("--dtype", choices=LIBRARY_SUMS, default="float32", help="of the elements [float32]")
    p.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    return p


def sizes(args: argparse.Namespace, ranks: int) -> list[int]:
    """Return the sizes to measure, in bytes; refuse what MPI or a rank cannot take. Local."""
    itemsize = np.dtype(args.dtype).itemsize
    least, most = itemsize * ranks, itemsize * MAX_LIBRARY_NUMEL
    if args.min_bytes < least:
        raise ValueError(f"--min-bytes: expected at least {least}, one element a rank, got {args.min_bytes}")
    if args.max_bytes < args.min_bytes:
        raise ValueError(
            f"--max-bytes: expected at least --min-bytes, {args.min_bytes}, got {args.max_bytes}"
        )
    if args.max_bytes > most:
        raise ValueError(f"--max-bytes: expected at most {most}, 2^31 - 1 elements, got {args.max_bytes}")
    found = [args.min_bytes]
    while found[-1] * STEP_FACTOR <= args.max_bytes:
        found.append(found[-1] * STEP_FACTOR)
    return found


def main(comm: Communicator, argv: Sequence[str]) -> int:
    """Run the benchmark on every rank; return the exit code: 0, or 1 if a result is wrong."""
    hosts = comm.hosts()
    with comm.together():
        args = parser().parse_args(argv)
        each = sizes(args, comm.size)
        if comm.size > 1:
            host = hosts[comm.rank]
            needed = hosts.count(host) * WHOLE_VECTORS * max(each)
            refuse_more_than_fits("--max-bytes: expected a size", needed, host, physical_bytes())
    comm.agree(**{f"--{name.replace('_', '-')}": value for name, value in vars(args).items()})
    with comm.together():
        target = report.JsonFile(args.json) if args.json is not None and comm.rank == 0 else None
    return _bench(comm, args, each, target)


def _bench(
    comm: Communicator, args: argparse.Namespace, each: Sequence[int], target: report.JsonFile | None
) -> int:
    wrong: list[str] = []

    def say(*lines: str) -> None:
        if comm.rank == 0:
            wrong.append(report.say(lines))

    environment = {
        "ranks": comm.size,
        "hosts": len(set(comm.hosts())),
        "ranks_outnumber_cores": comm.defers_sends,
        "mpi": comm.transport.describe(),
        "numpy": np.__version__,
    }
    hosts = "1 host" if environment["hosts"] == 1 else f"{environment['hosts']} hosts"
    crowded = ", more ranks than cores" if comm.defers_sends else ""
    repeated = report.counted(args.repeats, "repeat")
    say(
        f"# zero_mpi bench: ring against {environment['mpi']}",
        f"# n = {comm.size} on {hosts}{crowded}; numpy {environment['numpy']}",
        f"# median, p5 and p95 of {repeated} of the slowest rank, ours and the library's in turn",
    )
    rows = []
    for operation in OPERATIONS:
        say(*heading(operation.name))
        for nbytes in each:
            rows.append(measure(comm, operation, nbytes, args.dtype, args.repeats))
            say(*lines_of(rows[-1]))
    result = {"rows": rows, "counting": counting_cost(comm, args.dtype, args.repeats)}
    code = int(any(row[by]["wrong"] for row in rows if row["ours"] for by in ("ours", "library")))
    if target is not None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        document = {"schema": SCHEMA, "settings": settings, "environment": environment, **result}
        wrong.append(target.write({**document, "exit_code": code}))
    say(*closing(result))
    return report.finish(comm, code, wrong)
