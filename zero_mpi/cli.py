"""The command line: arguments, exit codes, the hook that ends a job whose rank fails.

Exit codes: 0 all checks hold; 1 one fails, or a number stops being finite; 2 a mistake in what was asked;
3 an error that was not foreseen (comm.py); 130 and 143 after Ctrl-C and SIGTERM.

Not for: import; nobody imports it but __main__.py.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn

import numpy as np

from . import __version__, report
from .comm import Communicator, SharedMistake
from .data import Batch, Data, FileRows, SeedStream, load_npz
from .engine import NotFinite
from .fit import physical_bytes, refuse_what_cannot_fit
from .model import MLP
from .optim import Adam
from .precision import PRECISIONS, WIRE_DTYPES, Precision
from .run import Settings, run_on
from .schemes import DP, SCHEMES, Scheme
from .transport import MPIMissing, launched_rank, launched_size, launcher_mismatch

HOLDS, FAILS, MISTAKE = 0, 1, 2

ANSWERS = ("-h", "--help", "--version")

EXAMPLES = """\
examples:
  mpiexec -n 8 python -m zero_mpi --scheme all
  mpiexec -n 4 python -m zero_mpi --scheme zero3 --dims 99,50,9 --json out.json
  mpiexec -n 4 python -m zero_mpi --data digits.npz --dims 64,128,10 --epochs 3
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    return _whole(text, least=1)


def seed_int(text: str) -> int:
    """Return a whole number of at least 0."""
    return _whole(text, least=0)


def _whole(text: str, least: int) -> int:
    # Plain digits: Python's int also takes 1_0, and digits of other scripts. Its length is limited, too.
    plain = text.isascii() and text.isdigit() and len(text) <= 10
    if not plain or not least <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {least} to 2147483647, got {_shown(text)}"
        )
    return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def positive_float(text: str) -> float:
    """Return a finite number above 0."""
    try:
        value = 0.0 if "_" in text else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {_shown(text)}")
    return value


def widths(text: str) -> tuple[int, ...]:
    """Return the widths of an MLP, from a list such as 64,128,10."""
    dims = tuple(positive_int(part.strip()) for part in text.split(","))
    if len(dims) < 2:
        raise argparse.ArgumentTypeError(
            f"expected at least two widths, such as 64,128,10, got {_shown(text)}"
        )
    return dims


def sizes(text: str) -> tuple[int, ...]:
    """Return numbers of ranks, in rising order, each once, from a list such as 1,2,4."""
    return tuple(sorted({positive_int(part.strip()) for part in text.split(",")}))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    keys = [S.key for S in SCHEMES]
    p = _Parser(
        prog="python -m zero_mpi",
        usage="mpiexec -n N python -m zero_mpi [options]",
        description="Train one model as data parallel, ZeRO-1, ZeRO-2 and ZeRO-3 on MPI ranks;\n"
        "check that they learn the same bits, and count the bytes each holds and sends.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "--scheme",
        default="all",
        choices=["all", *keys],
        help="all (default), or one, which runs beside data parallel",
    )
    p.add_argument(
        "--dims", type=widths, default=(64, 128, 128, 64), help="widths of the MLP [64,128,128,64]"
    )
    p.add_argument("--steps", type=positive_int, help="steps to train [10, or all of --data]")
    p.add_argument("--batch", type=positive_int, default=8, help="rows of each rank's batch [8]")
    p.add_argument("--data", metavar="FILE", help="train on rows of x and y in an .npz file")
    p.add_argument("--epochs", type=positive_int, help="passes over --data [1]")
    p.add_argument("--lr", type=positive_float, default=1e-2, help="Adam's learning rate [0.01]")
    p.add_argument("--seed", type=seed_int, default=7, help="of batches and shuffling [7]")
    p.add_argument("--init-seed", type=seed_int, default=0, help="of the initial weights [0]")
    p.add_argument("--precision", choices=list(PRECISIONS), default="mixed", help="of storage [mixed]")
    p.add_argument("--reduce-dtype", choices=WIRE_DTYPES, default="float32", help="of gradients on the wire")
    p.add_argument("--gather-dtype", choices=WIRE_DTYPES, default="float32", help="of parameters on the wire")
    p.add_argument("--no-reference", action="store_true", help="leave out the replay on rank 0")
    p.add_argument("--no-check", action="store_true", help="run --scheme alone: no partner, no replay")
    p.add_argument("--audit-memory", action="store_true", help="look for arrays outside the ledger")
    p.add_argument("--json", metavar="FILE", help="write all evidence to FILE")
    p.add_argument("--sweep", type=sizes, metavar="N,N,...", help="run on each of these numbers of ranks")
    p.add_argument("--quiet", action="store_true", help="print only the verdicts")
    p.add_argument("--version", action="version", version=f"zero_mpi {__version__}")
    return p


def main(argv: Sequence[str]) -> int:
    """Run the command line on every rank; return the exit code, as above."""
    asked = next((a for a in argv if a in ANSWERS), "")
    if asked and launched_size() == 1:
        return _answer(asked)
    try:
        comm = Communicator()
    except MPIMissing as error:
        if asked:
            return _answer(asked)
        if launched_rank() == 0:
            report.complain(str(error))
        return MISTAKE
    alone = launcher_mismatch(comm.size)
    if alone is not None and not asked:
        if launched_rank() == 0:
            report.complain(alone)
        return MISTAKE
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without θ gets a question mark.
        sys.stdout.reconfigure(errors="replace")
    with comm.ending_job_on_error():
        return _main(comm, argv, asked)


def _answer(asked: str) -> int:
    """Print the help or the version, from one process. Local."""
    if launched_rank() > 0:
        return HOLDS
    text = f"zero_mpi {__version__}" if asked == "--version" else parser().format_help().rstrip()
    return MISTAKE if _complain_of([report.say([text])]) else HOLDS


def _complain_of(wrong: Sequence[str]) -> bool:
    """Say in one line what could not be written, if anything; return whether there was any. Local."""
    said = "; ".join(w for w in dict.fromkeys(wrong) if w)
    if said:
        report.complain(f"cannot be written: {said}")
    return bool(said)


def _main(comm: Communicator, argv: Sequence[str], asked: str) -> int:
    hosts = comm.hosts()
    try:
        # A rank that was asked for help would leave the others waiting.
        comm.agree(**{"--help or --version": asked or "neither"})
        if asked:
            return _answer(asked)
        with comm.together():
            args = parser().parse_args(argv)
            plans = _plans(args, comm.size)
            for n, plan in plans.items():
                if comm.rank < n:
                    _refuse_what_cannot_fit(args, plan, hosts[:n], comm.rank)
        comm.agree(**{f"--{name.replace('_', '-')}": value for name, value in vars(args).items()})
        comm.agree(**{f"rows of --data ({args.data})": plans[max(plans)].settings.data.fingerprint()})
        with comm.together():
            asks = args.json is not None and comm.rank == 0
            target = report.JsonFile(args.json) if asks else None
        return _train(comm, args, plans, target)
    except SharedMistake as error:
        if comm.rank == 0:
            report.complain(str(error))
        return MISTAKE


def _train(
    comm: Communicator, args: argparse.Namespace, plans: dict[int, "_Plan"], target: report.JsonFile | None
) -> int:
    """Run each plan on its number of ranks, report, and return the exit code."""
    environment = _environment(comm)
    said = plans[max(plans)].said
    wrong: list[str] = []
    if comm.rank == 0 and not args.quiet:
        wrong.append(report.say(report.header(said, environment, args.sweep)))
    results: dict[int, dict[str, Any]] = {}
    evidence: dict[str, Any] = {}
    failure = ""
    try:
        for size, plan in plans.items():
            results[size] = run_on(comm, size, plan.settings, _schemes(args))
        if not args.sweep:
            evidence = results[comm.size]
    except NotFinite as error:
        failure = str(error)
        evidence = {"failure": failure, "losses": error.losses}
    if args.sweep:
        evidence["sweep"] = [{"ranks": n, "settings": plans[n].said, **results[n]} for n in results]
    holds = all(verdict["holds"] for result in results.values() for verdict in result["verdicts"])
    code = HOLDS if holds and not failure else FAILS
    if comm.rank == 0:
        # The file first: what it holds must not depend on a terminal.
        if target is not None:
            wrong.append(
                target.write({"settings": said, "environment": environment, **evidence, "exit_code": code})
            )
        if not failure:
            wrong.append(report.say(report.result_lines(results, args.quiet)))
        else:
            # Tables of some of the schemes or sizes would look like the whole.
            lines = report.losses_so_far(evidence["losses"])
            if lines and not args.quiet:
                wrong.append(report.say(lines))
            report.complain(failure)
        if _complain_of(wrong):
            code = code or MISTAKE
    return int(comm.allgather_scalar(code, np.int64)[0])


class _Plan(NamedTuple):
    """The settings of a run, and the same as reports say them."""

    settings: Settings
    said: dict[str, Any]


def _plans(args: argparse.Namespace, size: int) -> dict[int, _Plan]:
    """Return what to run on how many ranks. Local."""
    for n in args.sweep or ():
        if n > size:
            raise ValueError(f"--sweep: expected sizes up to the job's {size} ranks, got {n}")
    rows = load_npz(args.data, args.dims[0], args.dims[-1]) if args.data is not None else None
    return {n: _plan(args, n, rows) for n in args.sweep or (size,)}


def _refuse_what_cannot_fit(args: argparse.Namespace, plan: "_Plan", hosts: list[str], rank: int) -> None:
    """Raise ValueError if a run on the ranks of `hosts` surely needs more memory than they have. Local."""
    # The activations that backward needs; and every rank draws the rows of all from the seed's stream.
    columns = sum(args.dims)
    if args.data is None:
        columns += len(hosts) * (args.dims[0] + args.dims[-1])
    refuse_what_cannot_fit(
        plan.settings, _schemes(args), hosts, rank, 4 * args.batch * columns, physical_bytes()
    )


def _schemes(args: argparse.Namespace) -> list[type[Scheme]]:
    chosen = [S for S in SCHEMES if args.scheme in ("all", S.key)]
    # "Identical" needs a partner.
    if DP not in chosen and not args.no_check:
        chosen.insert(0, DP)
    return chosen


def _plan(args: argparse.Namespace, size: int, rows: tuple[Batch, str] | None) -> _Plan:
    """Return the plan for `size` ranks. Local."""
    model = MLP(args.dims)
    precision = Precision.named(args.precision, args.reduce_dtype, args.gather_dtype)
    optimizer = Adam(lr=args.lr)
    data, text, steps = _data(args, size, rows)
    settings = Settings(
        model=model,
        data=data,
        precision=precision,
        optimizer=optimizer,
        init_seed=args.init_seed,
        steps=steps,
        check=not args.no_check,
        reference=not (args.no_reference or args.no_check),
        audit_memory=args.audit_memory,
    )
    said = {
        "scheme": args.scheme,
        "model": model.describe(),
        "n_params": model.n_params,
        "units": len(model.units),
        "unit_numels": model.units,
        "data": text,
        "steps": steps,
        "batch": args.batch,
        "optimizer": "Adam lr {lr:g}, betas {beta1:g} {beta2:g}, eps {eps:g}".format(**asdict(optimizer)),
        "lr": args.lr,
        "seed": args.seed,
        "init_seed": args.init_seed,
        "precision": precision.name,
        "params_dtype": precision.params,
        "grads_dtype": precision.grads,
        "reduce_dtype": precision.reduce,
        "gather_dtype": precision.gather,
        "check": settings.check,
        "reference": settings.reference,
    }
    return _Plan(settings, said)


def _data(args: argparse.Namespace, size: int, rows: tuple[Batch, str] | None) -> tuple[Data, str, int]:
    """Return where batches come from, the words for it, and the most steps to take. Local."""
    if rows is None:
        if args.epochs is not None:
            raise ValueError("--epochs: expected --data FILE beside it; without, use --steps")
        steps = 10 if args.steps is None else args.steps
        stream = SeedStream(args.seed, args.batch, args.dims[0], args.dims[-1])
        return stream, f"random normal, seed {args.seed}", steps
    (x, y), note = rows
    epochs = args.epochs or 1
    data = FileRows(x, y, seed=args.seed, rows=args.batch, epochs=epochs)
    per_epoch, dropped = data.steps_per_epoch(size), data.dropped_rows(size)
    if per_epoch == 0:
        raise ValueError(
            f"{args.data}: expected at least {size * args.batch} rows, a global batch of "
            f"{size} x {args.batch}, got {len(x)}"
        )
    steps = per_epoch * epochs if args.steps is None else min(args.steps, per_epoch * epochs)
    text = f"{os.path.basename(args.data)}: {report.counted(len(x), 'row')}, "
    text += f"{report.counted(per_epoch, 'step')} an epoch, "
    text += f"shuffled by seed {args.seed}"
    if dropped:
        rows_left = "the last row" if dropped == 1 else f"the last {dropped} rows"
        text += f"; {rows_left} of an epoch, an incomplete global batch, "
        text += "is dropped" if dropped == 1 else "are dropped"
    if note:
        text += f"; converted: {note}"
    return data, text, steps


def _environment(comm: Communicator) -> dict[str, Any]:
    """Return where the job runs. Collective."""
    config: Any = np.show_config(mode="dicts")
    # A numpy built without BLAS has less to say.
    blas = config.get("Build Dependencies", {}).get("blas", {})
    threads = next(
        (os.environ[n] for n in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if n in os.environ), ""
    )
    return {
        "zero_mpi": __version__,
        "ranks": comm.size,
        "hosts": len(set(comm.hosts())),
        "mpi": comm.transport.describe(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name', 'unknown BLAS')} {blas.get('version', '')}".strip(),
        "blas_threads": f"{threads or 'its own choice of'} thread{'' if threads == '1' else 's'} a rank",
    }
