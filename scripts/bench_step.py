"""Time a training step of the four schemes, side by side with PyTorch's on CPU where torch is installed.

Not for: tests to assert on; times depend on the machine, and on who else uses it. Our collectives beside the
MPI library's are another benchmark.

    python scripts/bench_step.py                                  all models, N = 2 and 4, five rounds
    python scripts/bench_step.py --ranks 2 --models 64-128-128-64 --json times.json
    python scripts/bench_step.py --profile                        where our step's time goes, without torch

Both sides train the same MLP from the same weights on the same rows, float32, mean squared error, Adam, one
thread a rank; the first losses are compared. Jobs are short and take turns (ours, PyTorch's, ours, ...), so
that both sides see the same machine. A round's number is the median over steps on the slowest rank, a table's
the median over rounds. PyTorch runs with gloo under several settings (step_torch.py); the fastest one counts.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
ROWS = 8
MODELS = "64-128-128-64,512-1024-1024-512,1024-2048-2048-2048-1024"

# Each scheme, what it is measured against, and the share of its time that ours should take at most.
RIVALS = {
    "dp": ("data parallel", "DDP", 0.8),
    "zero1": ("ZeRO-1", "ZeroRedundancyOptimizer", 0.6),
    "zero2": ("ZeRO-2", "FSDP2", 0.5),
    "zero3": ("ZeRO-3", "FSDP2, resharding", 0.5),
}

# What both sides run with: one BLAS thread, and a C library that keeps what is freed, as our command line
# does. The last four are harmless elsewhere: without them Open MPI refuses root, and more ranks than cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}

Dims = tuple[int, ...]
Found = dict[str, dict[str, Any]]


class Mistake(Exception):
    """What ends the benchmark with one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = _Parser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    p.add_argument("--ranks", type=_numbers, default=(2, 4), metavar="N,N,...", help="numbers of ranks [2,4]")
    p.add_argument("--models", type=_models, default=_models(MODELS), metavar="D-D-D,...", help=f"[{MODELS}]")
    p.add_argument("--rounds", type=_positive, default=5, help="jobs of each side [5]")
    p.add_argument("--steps", type=_positive, help="timed in a job [5 to 200, by the model's size]")
    p.add_argument("--timeout", type=_positive, default=300, metavar="S", help="seconds a job may take [300]")
    p.add_argument("--no-torch", action="store_true", help="our side alone")
    p.add_argument("--profile", action="store_true", help="where our step's time goes, instead of PyTorch's")
    p.add_argument("--json", metavar="FILE", help="write every round's times to FILE")
    return p


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _models(text: str) -> tuple[Dims, ...]:
    models = tuple(tuple(_positive(width) for width in part.split("-")) for part in text.split(","))
    if any(len(dims) < 2 for dims in models):
        raise argparse.ArgumentTypeError(f"expected widths such as 64-128-10, at least two, got {text!r}")
    return models


def n_params(dims: Dims) -> int:
    """Return the number of parameters of the MLP of these widths."""
    return sum(i * o + o for i, o in zip(dims, dims[1:], strict=False))


class Process:
    """One of a job's processes. What it writes goes to files, not pipes: nobody reads while a job runs."""

    def __init__(self, command: list[str], extra: dict[str, str], directory: str) -> None:
        self.name = next(Path(part).name for part in command if part.endswith(".py"))
        self.out, self.err = (Path(directory, f"{kind}{extra.get('RANK', '')}") for kind in ("out", "err"))
        with self.out.open("w") as out, self.err.open("w") as err:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, **ENVIRONMENT, **extra},
                start_new_session=True,
            )

    def last_words(self) -> str:
        """Return the exit code, and the line in which the process says what is wrong."""
        lines = [line.strip() for line in self.err.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line.split(":")[0]]
        words = errors[0] if errors else lines[-1] if lines else "nothing said"
        return f"code {self.popen.returncode}: {words}"

    def end(self, patience_s: float = 5.0) -> None:
        """End it and the group it leads, if it still runs; mpiexec ends its ranks when it is told to."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.popen.poll() is not None:
                return
            os.killpg(self.popen.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(patience_s)


class Bench:
    """Starts jobs and waits for them, each alone on the machine as far as we are concerned."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.mpiexec = self._mpiexec()

    @staticmethod
    def _mpiexec() -> str:
        """Return the mpiexec that belongs to this Python: beside it, or on the path."""
        beside = Path(sys.executable).parent / "mpiexec"
        found = str(beside) if beside.exists() else shutil.which("mpiexec")
        if found is None:
            raise Mistake("expected mpiexec beside this Python or on the PATH: pip install 'zero_mpi[mpich]'")
        return found

    def ours(self, size: int, dims: Dims) -> Found:
        """Time, or profile, our schemes on `size` ranks."""
        command = [self.mpiexec, "-n", str(size), *self._program("step_ours.py", dims)]
        return self._run([command + ["--profile"] * self.args.profile])

    def numpy_alone(self, dims: Dims) -> Found:
        """Time the same step on one process, without schemes and MPI."""
        return self._run([[*self._program("step_ours.py", dims), "--alone"]])

    def torch(self, size: int, dims: Dims) -> Found:
        """Time PyTorch's on `size` ranks."""
        ranks = [{"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
        return self._run([self._program("step_torch.py", dims)] * size, ranks)

    def _program(self, name: str, dims: Dims) -> list[str]:
        steps = self.args.steps or max(5, min(200, 40_000_000 // n_params(dims)))
        widths = ",".join(map(str, dims))
        return [
            sys.executable,
            str(HERE / name),
            "--dims",
            widths,
            "--rows",
            str(ROWS),
            "--steps",
            str(steps),
        ]

    def _run(self, commands: list[list[str]], extras: Sequence[dict[str, str]] = ({},)) -> Found:
        """Run the processes of one job to their end; return what one of them printed, which is JSON.

        Raises
        ------
        Mistake : one of them failed, or they took too long. None is left.
        """
        deadline = time.monotonic() + self.args.timeout
        processes: list[Process] = []
        with tempfile.TemporaryDirectory() as directory:
            try:
                for command, extra in zip(commands, extras, strict=True):
                    processes.append(Process(command, {**extra, "MEETING": f"{directory}/ranks"}, directory))
                self._wait(processes, deadline)
            finally:
                for process in processes:
                    process.end()
            said = "".join(process.out.read_text() for process in processes)
        if not said:
            raise Mistake(f"{processes[0].name}: expected times, got nothing")
        try:
            return json.loads(said)
        except ValueError:
            raise Mistake(f"{processes[0].name}: expected times, got {said.splitlines()[0][:60]!r}") from None

    def _wait(self, processes: list[Process], deadline: float) -> None:
        """Return when all have ended well; raise as soon as one has not, or the time is up."""
        waiting = processes
        while waiting:
            for process in waiting:
                if process.popen.poll():
                    raise Mistake(f"{process.name} ended with {process.last_words()}")
            waiting = [process for process in waiting if process.popen.returncode is None]
            if waiting and time.monotonic() > deadline:
                raise Mistake(f"{waiting[0].name}: expected an end in {self.args.timeout} s (--timeout)")
            time.sleep(0.02)


def compare_losses(ours: Found, theirs: Found) -> None:
    """Refuse to compare times of what does not learn the same."""
    expected = ours["dp"]["losses"]
    for name, found in {**ours, **theirs}.items():
        off = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], expected, strict=True))
        # Float32 sums in another order: about 1e-6 here, where another model or another Adam is off by 0.01.
        if not off < 1e-3:
            raise Mistake(f"{name}: expected the first losses {expected}, as ours, got {found['losses']}")


def measure(bench: Bench, size: int, dims: Dims, with_torch: bool) -> dict[str, Any]:
    """Let both sides take turns, and return the milliseconds of every round by what was timed."""
    rounds: dict[str, list[float]] = {}
    for _ in range(bench.args.rounds):
        alone, ours = bench.numpy_alone(dims), bench.ours(size, dims)
        theirs = bench.torch(size, dims) if with_torch else {}
        compare_losses(ours, theirs)
        for name, found in {**alone, **ours, **theirs}.items():
            rounds.setdefault(name, []).append(found["ms"])
    return {"ranks": size, "dims": dims, "n_params": n_params(dims), "rounds_ms": rounds}


def head(size: int, rounds: int) -> list[str]:
    """Return the first lines of the table of one number of ranks."""
    return [
        f"N = {size}: ms a step, float32, {ROWS} rows and one thread a rank, {_median_of(rounds)}",
        "",
        "parameters  scheme            ours  PyTorch  ratio  at most  PyTorch's fastest",
    ]


def rows(one: dict[str, Any]) -> list[str]:
    """Return the lines of one model: each scheme beside the fastest settings of its rival."""
    medians = {name: statistics.median(ms) for name, ms in one["rounds_ms"].items()}
    lines = [f"{one['n_params']:10,}  {'numpy, one rank':15s} {medians['numpy']:6.2f}"]
    for key, (name, rival, at_most) in RIVALS.items():
        line = f"{'':10}  {name:14s} {medians[key]:7.2f}"
        theirs = {found: ms for found, ms in medians.items() if found.startswith(f"{rival}: ")}
        if theirs:
            fastest = min(theirs, key=lambda found: theirs[found])
            ratio = medians[key] / theirs[fastest]
            settings = fastest.removeprefix(f"{rival}: ")
            line += f" {theirs[fastest]:8.2f} {ratio:6.2f} {at_most:6.2f} {'' if ratio <= at_most else '!'}"
            line = f"{line:60s}{settings}"
        lines.append(line.rstrip())
    return lines


def profile(bench: Bench, size: int, dims: Dims) -> dict[str, Any]:
    """Return the milliseconds a step of each scheme by where they go, the median over rounds of each."""
    rounds = [bench.ours(size, dims) for _ in range(bench.args.rounds)]
    parts = {
        key: {
            part: statistics.median(one[key]["parts_ms"].get(part, 0.0) for one in rounds) for part in PARTS
        }
        for key in RIVALS
    }
    return {"ranks": size, "dims": dims, "n_params": n_params(dims), "parts_ms": parts}


# Where a step's time may go (step_ours.py watches), in the order of the table: what has to be, then the rest.
NEEDED = ("BLAS", "MPI", "Adam")
REST = ("sums", "copy", "fin.", "model", "mem.", "Python")
PARTS = NEEDED + REST


def _median_of(rounds: int) -> str:
    return "one round" if rounds == 1 else f"median of {rounds} rounds"


def profile_head(size: int, rounds: int) -> list[str]:
    """Return the first lines of the table of one number of ranks."""
    return [
        f"N = {size}: % of our step on rank 0, float32, {ROWS} rows a rank, {_median_of(rounds)}",
        "",
        "                   ms BLAS  MPI Adam  all | sums copy fin. model mem. Python",
    ]


def profile_rows(one: dict[str, Any]) -> list[str]:
    """Return the lines of one model: the shares of each scheme's step."""
    lines = [f"{one['n_params']:,} parameters"]
    for key, (name, _, _) in RIVALS.items():
        ms = one["parts_ms"][key]
        total = sum(ms.values())
        share = {part: 100 * ms[part] / total for part in PARTS}
        needed = [share[part] for part in NEEDED]
        shares = "".join(f"{part:5.0f}" for part in [*needed, sum(needed)])
        rest = "".join(f"{share[part]:{max(len(part), 4) + 1}.0f}" for part in REST)
        lines.append(f"  {name:13s} {total:6.2f}{shares} |{rest}")
    return lines


PROFILE_NOTE = (
    "MPI: transfer, and waiting for other ranks. Adam: its element passes. all: these",
    "three together. sums: adding up what came. copy: converting, averaging, copying.",
    "fin.: looking for NaN and infinity. model: bias, ReLU, loss. mem.: allocation.",
    "Python: everything else, and the watch itself, about 0.1 ms a step.",
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return 0, or 2 after one line that says what is wrong."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        args = parser().parse_args(argv)
        _bench(args)
    except (Mistake, OSError) as mistake:
        print(f"bench_step: error: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _bench(args: argparse.Namespace) -> None:
    if args.json:
        # Now, not after an hour; and nothing is left where a run fails.
        target = Path(args.json)
        there = target.exists()
        target.open("a").close()
        if not there:
            target.unlink()
    bench = Bench(args)
    with_torch = not args.no_torch and importlib.util.find_spec("torch") is not None
    if not with_torch and not args.profile:
        print("PyTorch is left out: our rows alone." if args.no_torch else "No torch here: our rows alone.")
    what = "bench_step_profile" if args.profile else "bench_step"
    results = []
    for size in args.ranks:
        print("", *(profile_head if args.profile else head)(size, args.rounds), sep="\n", flush=True)
        for dims in args.models:
            one = profile(bench, size, dims) if args.profile else measure(bench, size, dims, with_torch)
            print(*(profile_rows if args.profile else rows)(one), sep="\n", flush=True)
            results.append(one)
            if args.json:
                evidence = {"schema": f"zero_mpi.{what}/1", "rounds": args.rounds, "results": results}
                Path(args.json).write_text(json.dumps(evidence, indent=1) + "\n")
    if args.profile:
        print("", *PROFILE_NOTE, sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
