"""Compare: the command that holds two certificates against each other.

Not for: what a certificate is (certificate.py).
"""

import argparse
from collections.abc import Sequence
from typing import Any

from . import report
from .arguments import Parser
from .certificate import Comparison, compare, read, settings_that_differ
from .comm import Communicator

# Settings under which other bits are no mistake, and why.
EXPLAIN = {
    "scheme": "another scheme may add micro-batches up in another order",
    "ranks": "another number of ranks cuts and sums differently",
    "reduction": "another order of summation",
    "reduce_every": "another order of accumulation",
    "accumulate": "another order of accumulation",
    "precision": "other dtypes at rest",
    "params_dtype": "other dtypes at rest",
    "grads_dtype": "other dtypes at rest",
    "reduce_dtype": "another dtype on the wire",
    "optimizer": "another optimizer or another schedule",
    "lr": "another optimizer or another schedule",
    "momentum": "another optimizer or another schedule",
    "weight_decay": "another optimizer or another schedule",
    "schedule": "another optimizer or another schedule",
    "warmup": "another optimizer or another schedule",
    "clip_norm": "another limit of the norm",
    "loss_scale": "another loss scale",
    "loss_scale_initial": "another loss scale",
    "freeze": "other units that are trained, and a frozen one has no float32 weights",
    "epochs": "other batches",
    "last_batch": "other batches",
    "seed": "other batches",
    "data": "other batches",
    "data_file": "other batches",
    "batch": "other batches",
    "init_seed": "other initial weights",
    "inject": "a mistake made on purpose",
    "mpi": "another MPI library's own collectives may sum in another order",
    "blas": "another BLAS may round a product otherwise",
    "numpy": "another numpy may round otherwise",
    "blas_threads": "another number of threads may cut a product otherwise",
}


# Settings under which two runs see other rows in a step, which explains all that follows.
EXPLAIN_DATA = {
    "ranks": "another number of ranks takes other rows in a step",
    "accumulate": "another number of micro-batches takes other rows in a step",
    **{name: why for name, why in EXPLAIN.items() if why == "other batches"},
    "inject": EXPLAIN["inject"],
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    p = Parser(
        prog="python -m zero_mpi compare",
        usage="python -m zero_mpi compare A.json B.json",
        description="Compare two certificates that runs wrote with --certificate: of other\n"
        "schemes, numbers of ranks or MPI libraries too, as far as they can be compared.\n"
        "Exit code 0 if all that could be is the same, 1 if they part, 2 if there is\n"
        "nothing to compare.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("first", metavar="A.json")
    p.add_argument("second", metavar="B.json")
    return p


def main(comm: Communicator, argv: Sequence[str]) -> int:
    """Run the command; rank 0 reads and speaks. Collective."""
    code, wrong = 0, []
    with comm.together():
        args = parser().parse_args(argv)
    comm.agree(**{"A.json": args.first, "B.json": args.second})
    with comm.together():
        if comm.rank == 0:
            first, second = read(args.first), read(args.second)
            found = compare(first, second)
            differ = settings_that_differ(first, second)
            code = 1 if any(c.cause for c in found) else 0
            wrong.append(report.say(lines(args.first, args.second, found, differ)))
    return report.finish(comm, code, wrong)


def lines(
    first: str, second: str, found: Sequence[Comparison], differ: Sequence[tuple[str, Any, Any]]
) -> list[str]:
    """Return the comparison as it is printed."""
    out = [*report.wrapped("A ", first), *report.wrapped("B ", second), ""]
    if differ:
        out += ["Settings that differ", *report.table([["", "A", "B"], *map(_row, differ)], left=3), ""]
    rows = [["A", "B", "same steps", "part first", "class"]]
    for c in found:
        same = f"{c.same_steps} of {c.steps}"
        rows.append([_short(c.first, 12), _short(c.second, 12), same, _where(c), c.cause or "-"])
    out += ["Chains of digests", *report.table(rows, left=5), ""]
    for text in dict.fromkeys(text for c in found for text in c.not_compared):
        out += report.wrapped("  not compared: ", text)
    if any(c.cause for c in found):
        only_data = all(c.cause in ("", "different data") for c in found)
        explain = EXPLAIN_DATA if only_data else EXPLAIN
        reasons = dict.fromkeys(explain[name] for name, _, _ in differ if name in explain)
        text = "nothing in the settings explains it. "
        if reasons:
            text = f"of the settings, these may: {'; '.join(reasons)}. "
        text += "Digests show no element: --scheme all does, and looks for the cause."
        out += report.wrapped("  ", text[0].upper() + text[1:])
    else:
        out += report.wrapped("  ", "The same bits wherever both could be compared.")
    return out


def _row(setting: tuple[str, Any, Any]) -> list[str]:
    name, one, other = setting
    return [_short(name, 20), *(_short(str(value), 26) for value in (one, other))]


def _short(text: str, width: int) -> str:
    """Return `text`, cut where it is longer than `width`; what a terminal would obey is spelt out."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _where(c: Comparison) -> str:
    if not c.cause:
        return "nowhere"
    # Its class says what is different of the data and of the initial weights.
    phase = "" if c.phase in ("data", "initial weights") else f", {c.phase}"
    unit = "" if c.unit is None else f", unit {c.unit}"
    return f"step {c.step}{phase}{unit}"
