"""Orders: train the same model under each order of summation, and measure by how much they part.

Not for: which order is right; all are, within rounding. A float64 sum is beside them to show that.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import checks, parting, report
from .arguments import Parser, positive_int, widths
from .comm import Communicator
from .data import MicroBatches, SeedStream
from .fit import batch_bytes, physical_bytes, refuse_what_cannot_fit
from .model import MLP
from .optim import Adam
from .precision import Precision
from .reducers import REDUCERS, Reducer, Ring
from .reference import Reference
from .run import Settings, on_first, run
from .schemes import DP, SCHEMES, Scheme

SCHEMA = "zero_mpi.orders/1"

# The distance between weights is said at these steps, and at the last.
SAID = (1, 10, 100)


class Row(NamedTuple):
    """What one reducer gave, beside the ring.

    Fields
    ------
    share, median_ulp, max_ulp : of the gradient after step 1, where all have the same weights: the share of
        elements that differ from the ring's, and by how many steps from float to float those do.
    exact_share, exact_max_ulp : the same against the sum in float64, rounded once.
    distances : max |theta - theta_ring| at the steps said.
    bytes_a_rank, messages_a_rank : sent in a step, the rank with most; None where they are not counted.
    schemes_identical : whether the four schemes hold the same bits under it; None if it cannot be judged.
    """

    reducer: str
    share: float
    median_ulp: float
    max_ulp: int
    exact_share: float
    exact_max_ulp: int
    distances: dict[int, float]
    final_loss: float
    bytes_a_rank: int | None
    messages_a_rank: int | None
    schemes_identical: bool | None


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    p = Parser(
        prog="python -m zero_mpi orders",
        usage="mpiexec -n N python -m zero_mpi orders [options]",
        description="Train the same model, in float32 on the same batches, under each order of\n"
        "summation, on 2 ranks and on all; print how far gradients and weights are from the\n"
        "ring's and from a sum in float64, and what each order sends.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--dims", type=widths, default=(64, 128, 128, 64), help="of the MLP [64,128,128,64]")
    p.add_argument("--steps", type=positive_int, default=100, help="steps to train [100]")
    p.add_argument("--batch", type=positive_int, default=8, help="rows of each rank's batch [8]")
    p.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    return p


def measure(comm: Communicator, args: argparse.Namespace) -> list[Row]:
    """Return a row for each reducer, the ring first, on all ranks of `comm`. Collective."""
    s = _settings(args, Ring)
    trained = [s.build(DP, comm, reducer) for reducer in REDUCERS.values()]
    ring = trained[0]
    reference = None
    if comm.rank == 0:
        reference = Reference(s.model, comm.size, s.precision, s.optimizer, s.init_seed)
    distances: list[dict[int, float]] = [{} for _ in trained]
    losses = [0.0] * len(trained)
    gradients: list[np.ndarray] = []
    exact = np.empty(0, np.float32)
    for step, batches in enumerate(itertools.islice(s.data.global_batches(comm.size), args.steps), 1):
        losses = [scheme.step(*batches[comm.rank]) for scheme in trained]
        if step == 1:
            gradients = [_gradient(scheme) for scheme in trained]
            with comm.root_works():
                if reference is not None:
                    exact = _in_float64(reference, batches)
        if step in SAID or step == args.steps:
            for scheme, found in zip(trained, distances, strict=True):
                apart = comm.allgather_scalar(checks.difference_of_weights(scheme, ring))
                found[step] = float(apart.max())
    rows = []
    for i, scheme in enumerate(trained):
        # Gradients are whole on rank 0 alone.
        apart = parting.ulp_distances(gradients[i], gradients[0]) if comm.rank == 0 else np.zeros(1, np.int64)
        from_exact = parting.ulp_distances(gradients[i], exact) if comm.rank == 0 else np.zeros(1, np.int64)
        rows.append(_row(scheme, apart, from_exact, distances[i], losses[i], _identical(comm, args, scheme)))
    return rows


def _settings(args: argparse.Namespace, reducer: type[Reducer]) -> Settings:
    return Settings(
        model=MLP(args.dims),
        data=SeedStream(7, args.batch, args.dims[0], args.dims[-1]),
        precision=Precision.named("fp32"),
        optimizer=Adam(),
        steps=min(10, args.steps),
        reducer=reducer,
        reference=False,
    )


def _identical(comm: Communicator, args: argparse.Namespace, scheme: Scheme) -> bool | None:
    """Return whether the four schemes hold the same bits in the order of `scheme`, ten steps. Collective."""
    result = run(comm, _settings(args, type(scheme.reducer)), list(SCHEMES))
    return next(v["holds"] for v in result["verdicts"] if v["check"] == "learning")


def _row(
    scheme: Scheme,
    apart: np.ndarray,
    from_exact: np.ndarray,
    distances: dict[int, float],
    loss: float,
    identical: bool | None,
) -> Row:
    sent = scheme.step_traffic.total(traffic="model")
    most = scheme.comm.allgather_array(np.array([sent.sent_bytes, sent.sent_messages], np.int64)).max(axis=0)
    counted = scheme.reducer.held_to is not None
    differ = apart[apart > 0]
    return Row(
        scheme.reducer.name,
        float(np.mean(apart > 0)),
        float(np.median(differ)) if differ.size else 0.0,
        int(apart.max()),
        float(np.mean(from_exact > 0)),
        int(from_exact.max()),
        distances,
        loss,
        int(most[0]) if counted else None,
        int(most[1]) if counted else None,
        identical,
    )


def _gradient(scheme: Scheme) -> np.ndarray:
    """Return the whole mean gradient on rank 0; something of no use on the others. Collective."""
    blocks = [
        parting.gathered(scheme.comm, array, scheme.blocks[u].numel)
        for u in scheme.units
        for name, _, _, array in scheme.owned(u)
        if name == "grads"
    ]
    return np.concatenate(blocks)


def _in_float64(reference: Reference, batches: Sequence[MicroBatches]) -> np.ndarray:
    """Return the mean of the ranks' float32 gradients, added up in float64 and rounded once. Local."""
    reference.step(batches)
    (turn,) = reference.locals
    means = []
    for u in range(len(reference.model.units)):
        total = np.zeros(reference.model.units[u], np.float64)
        for gradient in turn:
            total += gradient[u]
        means.append((total / reference.size).astype(np.float32))
    return np.concatenate(means)


def main(comm: Communicator, argv: Sequence[str]) -> int:
    """Run the command on every rank; return 1 if the schemes part under an order that is known, else 0.

    Raises
    ------
    NotFinite : a loss or a gradient is not finite.
    """
    hosts = comm.hosts()
    with comm.together():
        args = parser().parse_args(argv)
        if comm.size < 2:
            raise ValueError("orders: expected at least 2 ranks, got 1: one term has one sum")
        refuse_what_cannot_fit(
            _settings(args, Ring),
            [*(DP for _ in REDUCERS), *SCHEMES],
            hosts,
            comm.rank,
            batch_bytes(args.dims, args.batch, comm.size),
            physical_bytes(),
            "smaller --dims or --batch, or more hosts",
        )
    comm.agree(**{f"--{name.replace('_', '-')}": value for name, value in vars(args).items()})
    with comm.together():
        target = report.JsonFile(args.json) if args.json is not None and comm.rank == 0 else None
    results: dict[int, list[Row]] = {}
    for size in dict.fromkeys((2, comm.size)):
        results[size] = on_first(comm, size, lambda part: measure(part, args)) or []
    code, wrong = 0, []
    if comm.rank == 0:
        code = int(any(row.schemes_identical is False for rows in results.values() for row in rows))
        evidence: dict[str, Any] = {
            "sizes": [{"ranks": n, "rows": [row._asdict() for row in rows]} for n, rows in results.items()]
        }
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        document = {"schema": SCHEMA, "settings": settings, **evidence, "exit_code": code}
        wrong = [target.write(document)] if target is not None else []
        wrong.append(report.say(lines(args, results)))
    return report.finish(comm, code, wrong)


def lines(args: argparse.Namespace, results: dict[int, list[Row]]) -> list[str]:
    """Return the tables, one block for each number of ranks."""
    dims = ",".join(map(str, args.dims))
    steps_said = report.counted(args.steps, "step")
    out = report.wrapped("", f"Orders of summation: MLP {dims}, float32, {steps_said}, data parallel")
    for size, rows in results.items():
        steps = list(rows[0].distances)
        out += ["", f"{size} ranks: the gradient of step 1, in elements that differ and in ULP"]
        table = [["order", "from ring", "median", "max", "from float64", "max"]]
        for r in rows:
            exact = [f"{r.exact_share:.1%}", str(r.exact_max_ulp)]
            table.append([r.reducer, f"{r.share:.1%}", f"{r.median_ulp:g}", str(r.max_ulp), *exact])
        out += report.table(table)
        out += ["", f"{size} ranks: max |θ-θ_ring| after so many steps, and the last loss"]
        table = [["order", *(f"step {s}" for s in steps), "loss"]]
        for r in rows:
            apart = (report.difference(r.distances[s]) for s in steps)
            table.append([r.reducer, *apart, f"{r.final_loss:.6g}"])
        out += report.table(table)
        out += ["", f"{size} ranks: what a rank sends in a step, the one that sends most"]
        table = [["order", "bytes", "messages", "schemes"]]
        for r in rows:
            same = {True: "same", False: "PART", None: "n/a"}[r.schemes_identical]
            table.append([r.reducer, _counted(r.bytes_a_rank), _counted(r.messages_a_rank), same])
        out += report.table(table)
    text = (
        "At N = 2 all agree, since a + b = b + a. From three ranks on another order gives other bits (of "
        "three, the reversed ring adds the same two first), and weights drift apart; all are rounded sums, "
        "none is the exact one. schemes: whether data parallel "
        "and ZeRO-1, 2 and 3 hold the same bits under that order. n/a: what the MPI library does not tell."
    )
    return [*out, "", *report.wrapped("  ", text)]


def _counted(value: int | None) -> str:
    return "n/a" if value is None else str(value)
