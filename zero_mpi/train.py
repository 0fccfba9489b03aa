"""Train: the command that trains schemes side by side and prints the evidence of both checks.

Not for: running (run.py) or judging (checks.py); here arguments become settings, and results a report.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import __version__, certificate, report
from .arguments import (
    Parser,
    float_from_0,
    fraction,
    limit,
    loss_scale,
    positive_float,
    positive_int,
    sizes,
    units,
    whole_from_0,
    widths,
)
from .comm import Communicator, OutOfStep
from .data import Batch, Data, FileRows, SeedStream, load_npz
from .engine import NotFinite
from .fit import batch_bytes, physical_bytes, refuse_what_cannot_fit
from .injection import FAULTS, check_makes_a_difference
from .model import MLP
from .optim import SGD, Adam, Optimizer
from .precision import PRECISIONS, WIRE_DTYPES, Precision
from .reducers import REDUCERS, Ring
from .run import Settings, family, run_on
from .schemes import DP, SCHEMES, Scheme
from .training import Schedule, Training

HELP = """\
usage: mpiexec -n N python -m zero_mpi [options]

Train one model as data parallel, ZeRO-1, ZeRO-2 and ZeRO-3 on MPI ranks; check
that they learn the same bits, and count the bytes each holds and sends.

what       --scheme all|{schemes}; one runs beside dp [all]
           --dims W,W,... of the MLP [64,128,128,64]  --init-seed S [0]
data       --batch ROWS of a rank's micro-batch [8]   --seed S, shuffles too [7]
           --data FILE.npz, its rows x and y          --epochs E [1]
           --steps T [10, or all of --data]     --last-batch drop|keep [drop]
step       --accumulate K micro-batches [1]           --clip-norm X [none]
           --reduce-every step|micro-batch [as each scheme does]
           --freeze U,U,... units [none]
           --loss-scale dynamic|X|none [none]
optimizer  --optimizer adam|adamw|sgd [adam]          --lr X [0.01]
           --weight-decay X, of adamw [0.01]          --momentum X, of sgd [0]
           --schedule constant|cosine [constant]      --warmup T updates [0]
dtypes     --precision mixed|bf16|fp32 [mixed]        --grad-dtype float32
           --reduce-dtype D [float32]                 --gather-dtype D [float32]
           D: float16, bfloat16, float32 or float64
sums       --reduction ring|reversed-ring|recursive-halving|rank-order|naive|
                       library [ring]
checks     --no-reference: no replay on rank 0        --no-check: no partner
           --audit-memory: arrays unknown to the ledger
           --inject FAULT: a mistake made on purpose, see `faults --list`
output     --sweep N,N,...: on so many of the ranks   --quiet: verdicts alone
           --json FILE: all evidence                  --certificate FILE
           --certificate-every T steps [1]            --version  --help

examples:
  mpiexec -n 8 python -m zero_mpi --scheme all
  mpiexec -n 4 python -m zero_mpi --scheme zero3 --accumulate 4 --json out.json
  mpiexec -n 4 python -m zero_mpi --data digits.npz --dims 64,128,10 --epochs 3
other commands: bench, orders, faults, compare A.json B.json; each has a --help
exit codes: 0 checks hold, 1 one fails, 2 a mistake in what was asked, 3 a crash
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    text = HELP.replace("{schemes}", "|".join(S.key for S in SCHEMES))
    p = Parser(text, prog="python -m zero_mpi", usage="mpiexec -n N python -m zero_mpi [options]")
    p.add_argument("--scheme", default="all", choices=["all", *(S.key for S in SCHEMES)])
    p.add_argument("--dims", type=widths, default=(64, 128, 128, 64))
    p.add_argument("--steps", type=positive_int)
    p.add_argument("--batch", type=positive_int, default=8)
    p.add_argument("--data", metavar="FILE")
    p.add_argument("--epochs", type=positive_int)
    p.add_argument("--last-batch", choices=["drop", "keep"], default="drop")
    p.add_argument("--accumulate", type=positive_int, default=1)
    p.add_argument("--reduce-every", choices=["step", "micro-batch"])
    p.add_argument("--optimizer", choices=["adam", "adamw", "sgd"], default="adam")
    p.add_argument("--lr", type=positive_float, default=1e-2)
    p.add_argument("--weight-decay", type=float_from_0)
    p.add_argument("--momentum", type=fraction)
    p.add_argument("--schedule", choices=["constant", "cosine"], default="constant")
    p.add_argument("--warmup", type=whole_from_0, default=0)
    p.add_argument("--clip-norm", type=limit)
    p.add_argument("--loss-scale", type=loss_scale)
    p.add_argument("--freeze", type=units, default=())
    p.add_argument("--seed", type=whole_from_0, default=7)
    p.add_argument("--init-seed", type=whole_from_0, default=0)
    p.add_argument("--precision", choices=list(PRECISIONS), default="mixed")
    p.add_argument("--reduce-dtype", choices=WIRE_DTYPES, default="float32")
    p.add_argument("--grad-dtype", choices=WIRE_DTYPES)
    p.add_argument("--gather-dtype", choices=WIRE_DTYPES, default="float32")
    p.add_argument("--reduction", choices=list(REDUCERS), default="ring")
    p.add_argument("--no-reference", action="store_true")
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--audit-memory", action="store_true")
    p.add_argument("--json", metavar="FILE")
    p.add_argument("--certificate", metavar="FILE")
    p.add_argument("--certificate-every", type=positive_int)
    p.add_argument("--inject", choices=list(FAULTS))
    p.add_argument("--sweep", type=sizes)
    p.add_argument("--quiet", action="store_true")
    p.add_argument("--version", action="version", version=f"zero_mpi {__version__}")
    return p


def main(comm: Communicator, argv: Sequence[str]) -> int:
    """Run the command on every rank; return the exit code: 0 all checks hold, 1 one fails.

    Raises
    ------
    SharedMistake : a mistake in what was asked. OutOfStep : ranks hand units over in different orders.
    """
    hosts = comm.hosts()
    with comm.together():
        args = parser().parse_args(argv)
        plans = _plans(args, comm.size)
        for n, plan in plans.items():
            if comm.rank < n:
                _refuse_what_cannot_fit(args, plan, hosts[:n], comm.rank)
    comm.agree(**{f"--{name.replace('_', '-')}": value for name, value in vars(args).items()})
    rows = "random rows" if args.data is None else f"rows of --data ({args.data})"
    comm.agree(**{rows: plans[max(plans)].settings.data.fingerprint()})
    return _train(comm, args, plans, _targets(comm, args))


class _Targets(NamedTuple):
    """Where files go, on rank 0; None for those that were not asked for."""

    json: report.JsonFile | None
    certificate: report.JsonFile | None


def _targets(comm: Communicator, args: argparse.Namespace) -> _Targets:
    found: list[report.JsonFile | None] = [None, None]
    with comm.together():
        for i, option in enumerate(("json", "certificate") if comm.rank == 0 else ()):
            path = getattr(args, option)
            if path is None:
                continue
            found[i] = target = report.JsonFile(path, f"--{option}")
            if args.data is not None and target.path == os.path.realpath(args.data):
                raise ValueError(
                    f"--{option} {path}: expected another file than that of --data, got the same"
                )
            if i and found[0] is not None and target.path == found[0].path:
                raise ValueError(
                    f"--{option} {path}: expected another file than that of --json, got the same"
                )
    return _Targets(*found)


def _train(comm: Communicator, args: argparse.Namespace, plans: dict[int, "_Plan"], targets: _Targets) -> int:
    """Run each plan on its number of ranks, report, and return the exit code."""
    environment = _environment(comm)
    said = plans[max(plans)].said
    wrong: list[str] = []
    if comm.rank == 0 and not args.quiet:
        wrong.append(report.say(report.header(_said_of_all(args, plans), environment, args.sweep)))
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
        evidence = {"failure": failure, "losses": error.losses, "certificate": error.chains or None}
    except OutOfStep as error:
        if not args.inject:
            raise
        failure = str(error)
        evidence = {"failure": failure, "losses": {}}
    if args.sweep:
        # A process keeps its peak from size to size: what the OS sees of it is of no one size.
        found = {n: {k: v for k, v in result.items() if k != "process"} for n, result in results.items()}
        evidence["sweep"] = [{"ranks": n, "settings": plans[n].said, **found[n]} for n in found]
    holds = all(v["holds"] is not False for result in results.values() for v in result["verdicts"])
    code = 0 if holds and not failure else 1
    if comm.rank == 0:
        # The file first: what it holds must not depend on a terminal.
        chains = evidence.pop("certificate", None)
        if targets.json is not None:
            wrong.append(
                targets.json.write(
                    {
                        "schema": report.SCHEMA,
                        "settings": said,
                        "environment": environment,
                        **evidence,
                        "exit_code": code,
                    }
                )
            )
        if targets.certificate is not None and chains is not None:
            # Its chains say which schemes ran, and "training" says once more what has a name of its own.
            settings = {name: said[name] for name in said if name not in ("schemes", "training")}
            document = certificate.document(chains, {**settings, **environment})
            wrong.append(targets.certificate.write(document))
        if not failure:
            lines = report.result_lines(results, args.quiet)
            if args.inject and holds:
                lines += ["", f"  No check that ran has seen the fault {args.inject}."]
            wrong.append(report.say(lines))
        else:
            # Tables of some of the schemes or sizes would look like the whole.
            lines = report.losses_so_far(evidence["losses"])
            if lines and not args.quiet:
                wrong.append(report.say(lines))
            report.complain(failure)
    return report.finish(comm, code, wrong)


def _said_of_all(args: argparse.Namespace, plans: dict[int, "_Plan"]) -> dict[str, Any]:
    """Return the settings for the header: of a sweep, what differs between sizes for each of them."""
    said = dict(plans[max(plans)].said)
    if len({(plan.said["dealt"], plan.said["steps"]) for plan in plans.values()}) == 1:
        return {**said, "data": ", ".join(filter(None, (said["data"], said["dealt"])))}
    each = (f"N = {n}: {plan.said['dealt']}" for n, plan in plans.items())
    steps = " or ".join(dict.fromkeys(str(plan.said["steps"]) for plan in plans.values()))
    training = _training_words(args, f"{steps} steps", plans[max(plans)].settings)
    return {**said, "data": "; ".join([said["data"], *each]), "training": training}


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
    # A file has its rows already, and no batch is larger than all of them.
    data = plan.settings.data
    drawn, rows = len(hosts) * args.accumulate, args.batch
    if isinstance(data, FileRows):
        drawn, rows = 0, min(rows, len(data.x))
    refuse_what_cannot_fit(
        plan.settings,
        _schemes(args),
        hosts,
        rank,
        batch_bytes(args.dims, rows, drawn),
        physical_bytes(),
        "smaller --dims or --batch, more hosts, one --scheme, or --no-reference",
    )


def _schemes(args: argparse.Namespace) -> list[type[Scheme]]:
    chosen = [S for S in SCHEMES if S.key in _asked(args)]
    if args.no_check:
        return chosen
    # "Identical" needs a partner: data parallel, and one that adds in the same order, where that does not.
    if DP not in chosen:
        chosen.insert(0, DP)
    job = Training(accumulate=args.accumulate, reduce_every=args.reduce_every)
    for S in [*chosen]:
        alike = [other for other in SCHEMES if family(other, job) == family(S, job)]
        if S is not DP and not any(other in chosen for other in alike if other is not S):
            chosen.append(next(other for other in alike if other is not S))
    return [S for S in SCHEMES if S in chosen]


def _asked(args: argparse.Namespace) -> list[str]:
    """Return the keys of the schemes that were asked for, without those that run beside a single one."""
    return [S.key for S in SCHEMES if args.scheme in ("all", S.key)]


def _plan(args: argparse.Namespace, size: int, rows: tuple[Batch, str] | None) -> _Plan:
    """Return the plan for `size` ranks. Local."""
    if args.certificate_every is not None and args.certificate is None:
        raise ValueError("--certificate-every: expected --certificate FILE beside it")
    if args.certificate is not None and args.sweep:
        raise ValueError("--certificate: expected one number of ranks, got --sweep")
    model = MLP(args.dims)
    precision = Precision.named(args.precision, args.reduce_dtype, args.gather_dtype, args.grad_dtype)
    optimizer = _optimizer(args)
    data, text, dealt, steps = _data(args, size, rows)
    training = Training(
        accumulate=args.accumulate,
        reduce_every=args.reduce_every,
        clip_norm=args.clip_norm,
        loss_scale=args.loss_scale,
        schedule=Schedule(args.schedule, args.warmup, steps),
        freeze=args.freeze,
    )
    training.check_units(len(model.units))
    reducer = REDUCERS[args.reduction]
    if reducer.held_to is None and args.reduce_dtype not in ("float32", "float64"):
        raise ValueError(
            f"--reduction library: expected a reduce dtype that MPI can sum, float32 or float64, "
            f"got {args.reduce_dtype}"
        )
    if args.inject:
        keys = _asked(args)
        needs = {name: getattr(args, name) for name in ("accumulate", "clip_norm", "audit_memory")}
        check_makes_a_difference(FAULTS[args.inject], keys, size, steps, len(model.units), **needs)
        if args.freeze:
            raise ValueError(f"--inject {args.inject}: expected all units trained, got --freeze")
        if args.no_reference and FAULTS[args.inject].check == "reference":
            raise ValueError(f"--inject {args.inject}: only the reference can see it, got --no-reference")
        if args.no_check and FAULTS[args.inject].check in ("learning", "reference"):
            raise ValueError(f"--inject {args.inject}: expected checks that can see it, got --no-check")
        if reducer is not Ring:
            raise ValueError(f"--inject {args.inject}: expected --reduction ring, got {args.reduction}")
    if args.audit_memory and steps < 2:
        raise ValueError("--audit-memory: expected at least 2 steps, since it looks at the second, got 1")
    settings = Settings(
        model=model,
        data=data,
        precision=precision,
        optimizer=optimizer,
        training=training,
        init_seed=args.init_seed,
        steps=steps,
        reducer=reducer,
        check=not args.no_check,
        reference=not (args.no_reference or args.no_check),
        audit_memory=args.audit_memory,
        certificate_every=(args.certificate_every or 1) if args.certificate is not None else None,
        fault=FAULTS[args.inject] if args.inject else None,
        faulty=tuple(key for key in _asked(args) if args.inject and key in FAULTS[args.inject].schemes),
    )
    scale = training.loss_scale
    said = {
        "scheme": args.scheme,
        "schemes": [S.name for S in _schemes(args)],
        "model": model.describe(),
        "n_params": model.n_params,
        "units": len(model.units),
        "unit_numels": model.units,
        "dims": list(args.dims),
        "data": text,
        "data_file": args.data,
        "dealt": dealt,
        "epochs": data.epochs if isinstance(data, FileRows) else None,
        "last_batch": args.last_batch,
        "steps": steps,
        "batch": args.batch,
        "training": _training_words(args, report.counted(steps, "step"), settings),
        "optimizer": args.optimizer,
        "lr": args.lr,
        "momentum": getattr(optimizer, "momentum", None),
        "weight_decay": optimizer.weight_decay,
        "accumulate": training.accumulate,
        "reduce_every": training.reduce_every or "as each scheme does",
        "clip_norm": training.clip_norm,
        "loss_scale": scale and ("dynamic" if scale.dynamic else "fixed"),
        "loss_scale_initial": scale and scale.initial,
        "loss_scale_growth_every_steps": scale.growth_every if scale and scale.dynamic else None,
        "loss_scale_floor": scale.floor if scale and scale.dynamic else None,
        "schedule": args.schedule,
        "warmup": args.warmup,
        "freeze": list(training.freeze),
        "seed": args.seed,
        "init_seed": args.init_seed,
        "precision": precision.name,
        "params_dtype": precision.params,
        "grads_dtype": precision.grads,
        "reduce_dtype": precision.reduce,
        "gather_dtype": precision.gather,
        "reduction": reducer.name,
        "inject": args.inject,
        "check": settings.check,
        "reference": settings.reference and bool(reducer.order),
        "audit_memory": settings.audit_memory,
        "certificate_every_steps": settings.certificate_every,
    }
    return _Plan(settings, said)


def _optimizer(args: argparse.Namespace) -> Optimizer:
    """Return the optimizer that was asked for. Local."""
    if args.weight_decay is not None and args.optimizer != "adamw":
        raise ValueError(f"--weight-decay: expected --optimizer adamw beside it, got {args.optimizer}")
    if args.momentum is not None and args.optimizer != "sgd":
        raise ValueError(f"--momentum: expected --optimizer sgd beside it, got {args.optimizer}")
    if args.optimizer == "sgd":
        return SGD(lr=args.lr, momentum=args.momentum or 0.0)
    if args.optimizer == "adamw":
        return Adam(lr=args.lr, weight_decay=0.01 if args.weight_decay is None else args.weight_decay)
    return Adam(lr=args.lr)


def _training_words(args: argparse.Namespace, steps: str, settings: Settings) -> list[str]:
    """Return how a step is made, for the header of a run. steps : how many, in words."""
    training, rows = settings.training, report.counted(args.batch, "row")
    words = [f"{steps}, {rows} a rank and step", settings.optimizer.describe()]
    if training.accumulate > 1:
        words[0] = f"{steps} of {training.accumulate} micro-batches of {rows} a rank"
    warmup = f"{report.counted(args.warmup, 'update')} of warm-up" if args.warmup else "no warm-up"
    if training.accumulate > 1 or training.reduce_every:
        words.append(f"gradients reduced {_WHEN[training.reduce_every]}")
    words += [
        f"{args.schedule} lr, {warmup}",
        "no clipping" if training.clip_norm is None else f"gradient clipped to norm {training.clip_norm:g}",
        "no loss scale" if training.loss_scale is None else f"loss scale {training.loss_scale.describe()}",
    ]
    frozen = ", ".join(map(str, training.freeze))
    return [*words, f"frozen units {frozen}" if frozen else "no frozen units"]


_WHEN = {None: "as each scheme does", "step": "once a step", "micro-batch": "every micro-batch"}


def _data(args: argparse.Namespace, size: int, rows: tuple[Batch, str] | None) -> tuple[Data, str, str, int]:
    """Return where batches come from, words for it and for how it is dealt, and the steps to take. Local."""
    if rows is None:
        if args.epochs is not None:
            raise ValueError("--epochs: expected --data FILE beside it; without, use --steps")
        steps = 10 if args.steps is None else args.steps
        if args.last_batch != "drop":
            raise ValueError("--last-batch: expected --data FILE beside it; the random stream has no end")
        stream = SeedStream(args.seed, args.batch, args.dims[0], args.dims[-1], args.accumulate)
        return stream, f"random normal, seed {args.seed}", "", steps
    (x, y), note = rows
    if args.accumulate > len(x):
        raise ValueError(f"--accumulate: expected at most the {len(x)} rows of --data, got {args.accumulate}")
    epochs = args.epochs or 1
    data = FileRows(
        x,
        y,
        seed=args.seed,
        rows=args.batch,
        epochs=epochs,
        accumulate=args.accumulate,
        keep_last=args.last_batch == "keep",
    )
    per_epoch, left = data.steps_per_epoch(size), data.left_rows(size)
    if per_epoch == 0:
        micro = f" x {args.accumulate}" if args.accumulate > 1 else ""
        raise ValueError(
            f"{args.data}: expected at least {data.global_rows(size)} rows, a global batch of "
            f"{size}{micro} x {args.batch}, got {len(x)}; --last-batch keep trains on fewer"
        )
    steps = per_epoch * epochs if args.steps is None else min(args.steps, per_epoch * epochs)
    text = f"{os.path.basename(args.data)}: {report.counted(len(x), 'row')}, shuffled by seed {args.seed}"
    if note:
        text += f", converted: {note}"
    dealt = f"{report.counted(per_epoch, 'step')} an epoch, {report.counted(epochs, 'epoch')}"
    if args.steps is not None and args.steps > steps:
        dealt += f", which end before --steps {args.steps}"
    if left:
        rows_left = "the last row" if left == 1 else f"the last {left} rows"
        fate = f"{'is' if left == 1 else 'are'} {'kept' if data.keep_last else 'dropped'}"
        dealt += f", {rows_left} of an epoch, an incomplete global batch, {fate}"
    return data, text, dealt, steps


def _environment(comm: Communicator) -> dict[str, Any]:
    """Return where the job runs; of what differs between ranks, each value. Collective."""
    hosts = comm.hosts()
    config: Any = np.show_config(mode="dicts")
    # A numpy built without BLAS has less to say.
    blas = config.get("Build Dependencies", {}).get("blas", {})
    name = blas.get("name", "unknown BLAS")
    own = next((v for part, v in _THREADS_OF.items() if part in name.lower()), "OPENBLAS_NUM_THREADS")
    set_to = [value for v in (own, "OMP_NUM_THREADS") if (value := os.environ.get(v, "")).isdigit()]
    threads = set_to[0] if set_to else ""
    mine = {
        "mpi": comm.transport.describe(),
        "numpy": np.__version__,
        "blas": f"{name} {blas.get('version', '')}".strip(),
        "blas_threads": f"{threads or 'its own choice of'} thread{'' if threads == '1' else 's'} a rank",
    }
    each = comm.allgather_object(mine)
    return {
        "zero_mpi": __version__,
        "ranks": comm.size,
        "hosts": len(set(hosts)),
        "ranks_per_host": _runs([hosts.count(host) for host in dict.fromkeys(hosts)]),
        **{what: " or ".join(dict.fromkeys(row[what] for row in each)) for what in mine},
    }


# The variable that each BLAS reads before OpenMP's.
_THREADS_OF = {
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
    "accelerate": "VECLIB_MAXIMUM_THREADS",
}


def _runs(counts: list[int]) -> str:
    """Return numbers as text, equal ones said once: "4 each" or "4, 4, 2"."""
    return f"{counts[0]} each" if len(set(counts)) == 1 else ", ".join(map(str, counts))
