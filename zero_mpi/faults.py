"""Faults: make every known mistake under every scheme it applies to, and see which check notices.

Not for: the mistakes themselves (injection.py).
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import report
from .arguments import Parser
from .comm import Communicator, OutOfStep, SharedMistake
from .data import SeedStream
from .engine import NotFinite
from .injection import FAULTS, Fault
from .model import MLP
from .optim import Adam
from .precision import Precision
from .run import Settings, run_on
from .schemes import DP, SCHEMES, Scheme
from .training import Training

SCHEMA = "zero_mpi.faults/1"

DIMS = (12, 30, 12)
STEPS = 4


class Outcome(NamedTuple):
    """What became of one fault under one scheme.

    Fields
    ------
    caught : whether the check that must see it did, and its cause was called what it must be.
    checks : all that failed. step, unit : where the numbers part, if they do. cause, says : as reported.
    """

    fault: str
    scheme: str
    caught: bool
    checks: list[str]
    step: int | None
    unit: int | None
    cause: str
    says: str


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    p = Parser(
        prog="python -m zero_mpi faults",
        usage="mpiexec -n N python -m zero_mpi faults [options]",
        description="Make known mistakes on purpose, on a small model, under every scheme they\n"
        "apply to, and print which check saw each and what it took for the cause. At least\n"
        "2 ranks; from 3 on all can be seen.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--only", metavar="NAME,...", help="these faults [all]")
    p.add_argument("--list", action="store_true", help="say what they are, and make none")
    p.add_argument("--json", metavar="FILE", help="write all evidence to FILE")
    return p


def chosen(names: str | None) -> list[Fault]:
    """Return the faults called `names`, a list such as nan,send-twice; all for None.

    Raises
    ------
    ValueError : there is none of that name.
    """
    if names is None:
        return list(FAULTS.values())
    for name in names.split(","):
        if name not in FAULTS:
            raise ValueError(f"--only: expected faults out of {', '.join(FAULTS)}, got {name!r}")
    return [FAULTS[name] for name in dict.fromkeys(names.split(","))]


def settings_of(fault: Fault, key: str, **options: Any) -> Settings:
    """Return a small run that makes `fault` under the scheme with `key`."""
    needs = dict(fault.needs)
    audit = needs.pop("audit_memory", False)
    training = Training(**needs)
    defaults = {
        "model": MLP(DIMS),
        "data": SeedStream(7, 4, DIMS[0], DIMS[-1], training.accumulate),
        "precision": Precision.named("fp32"),
        "optimizer": Adam(),
        "training": training,
        "steps": STEPS,
        "audit_memory": audit,
        "fault": fault,
        "faulty": (key,),
    }
    return Settings(**{**defaults, **options})


def make(comm: Communicator, fault: Fault, S: type[Scheme]) -> Outcome:
    """Make one fault under one scheme, beside data parallel without it. Collective."""
    schemes: list[type[Scheme]] = [S] if S is DP else [DP, S]
    try:
        result = run_on(comm, comm.size, settings_of(fault, S.key), schemes)
    except SharedMistake as error:
        cause = "different initial weights" if "initial weights" in str(error) else ""
        return _judged(fault, S, ["set-up"], None, None, cause, str(error))
    except NotFinite as error:
        return _judged(fault, S, ["non-finite"], *_step_and_unit(str(error)), "non-finite", str(error))
    except OutOfStep as error:
        return _judged(fault, S, ["order"], None, None, "", str(error))
    failed = [verdict for verdict in result["verdicts"] if verdict["holds"] is False]
    names = [verdict["check"] for verdict in failed]
    says = next((v["says"] for v in failed if v["check"] == fault.check), "")
    found = result["learning"]["schemes"][S.key]["parting"]
    if found is None:
        return _judged(fault, S, names, _step_and_unit(says)[0], None, "", says)
    return _judged(fault, S, names, found["step"], found["unit"], found["cause"], found["why"])


def _judged(
    fault: Fault,
    S: type[Scheme],
    checks: list[str],
    step: int | None,
    unit: int | None,
    cause: str,
    says: str,
) -> Outcome:
    # The reference stands in for data parallel where the mistake is made there.
    seen = fault.check in checks or (fault.check == "learning" and "reference" in checks)
    return Outcome(fault.name, S.name, seen and cause == fault.cause, checks, step, unit, cause, says)


def _step_and_unit(words: str) -> tuple[int | None, int | None]:
    """Return the numbers behind the first "step" and the first "unit" in `words`."""
    parts = words.replace(":", " ").replace(",", " ").split()
    found = []
    for name in ("step", "unit"):
        at = parts.index(name) + 1 if name in parts else len(parts)
        found.append(int(parts[at]) if at < len(parts) and parts[at].isdigit() else None)
    return found[0], found[1]


def main(comm: Communicator, argv: Sequence[str]) -> int:
    """Run the command on every rank; return 0 if every fault was caught and named, 1 if not."""
    with comm.together():
        args = parser().parse_args(argv)
        faults = chosen(args.only)
        if comm.size < 2 and not args.list:
            raise ValueError("faults: expected at least 2 ranks, got 1: alone, most make no difference")
        if args.list and args.json is not None:
            raise ValueError("--json: expected faults to make, got --list, which makes none")
        least = min(fault.least_ranks for fault in faults)
        if comm.size < least and not args.list:
            raise ValueError(f"--only: expected at least {least} ranks for {args.only}, got {comm.size}")
    comm.agree(**{f"--{name}": value for name, value in vars(args).items()})
    wrong: list[str] = []
    if args.list:
        if comm.rank == 0:
            listed = [line for f in faults for line in report.wrapped(f"  {f.name:<23} ", f.what)]
            wrong.append(report.say(listed))
        return report.finish(comm, 0, wrong)
    with comm.together():
        target = report.JsonFile(args.json) if args.json is not None and comm.rank == 0 else None
    possible = [fault for fault in faults if comm.size >= fault.least_ranks]
    outcomes = [make(comm, fault, S) for fault in possible for S in SCHEMES if S.key in fault.schemes]
    not_made = [fault for fault in faults if fault not in possible]
    code = 0 if all(o.caught for o in outcomes) else 1
    if comm.rank == 0:
        evidence = {
            "ranks": comm.size,
            "faults": [o._asdict() for o in outcomes],
            "not_made": [fault.name for fault in not_made],
            "exit_code": code,
        }
        if target is not None:
            wrong.append(target.write({"schema": SCHEMA, **evidence}))
        wrong.append(report.say(lines(outcomes, comm.size, not_made)))
    return report.finish(comm, code, wrong)


def lines(outcomes: Sequence[Outcome], size: int, not_made: Sequence[Fault] = ()) -> list[str]:
    """Return the matrix of faults; schemes of the same outcome share a line."""
    letters = _letters()
    merged: dict[tuple, list[str]] = {}
    for o in outcomes:
        seen = "".join(_LETTERS.get(check, check) for check in o.checks) or "nothing"
        step, unit = ("-" if value is None else str(value) for value in (o.step, o.unit))
        row = (o.fault, seen, step, unit, o.cause or "-", o.caught)
        merged.setdefault(row, []).append(letters[o.scheme])
    rows = [["fault", "under", "seen by", "step", "unit", "class"]]
    rows += [[row[0], "".join(schemes), *row[1:-1]] for row, schemes in merged.items()]
    table = report.table(rows, left=6)
    said = [f"Faults made on purpose, on {size} ranks"]
    if outcomes:
        # The mark takes no column: beside a long class there is no room for one.
        marks = ["  ", *("  " if row[-1] else "! " for row in merged)]
        said += [mark + line[2:] for mark, line in zip(marks, table, strict=True)]
        under = ", ".join(f"{letter} {name}" for name, letter in letters.items())
        said += ["", *report.wrapped("  ", LEGEND.format(under=under)), ""]
    for fault in not_made:
        words = f"{fault.name}: not made, it is no mistake below {fault.least_ranks} ranks"
        said += [*report.wrapped("  ", words), ""]
    for o in outcomes:
        if not o.caught:
            due = FAULTS[o.fault]
            words = f"seen by {', '.join(o.checks) or 'nothing'}, called {o.cause or 'nothing'}; "
            words += f"expected {due.check}, {due.cause or 'nothing'}"
            said += report.wrapped("! ESCAPED  ", f"{o.fault} under {o.scheme}: {words}")
    caught = sum(o.caught for o in outcomes)
    return [*said, f"  {caught} of {len(outcomes)} caught, and their cause named"]


LEGEND = (
    "under: {under}. seen by: L learning (beside data parallel without the fault), R "
    "the reference, M memory, T traffic, A audit; or the error that ends the run: set-up, order (of units), "
    "NaN (or infinity). step, unit: where numbers first part. class: what the evidence takes for the cause."
)
_LETTERS = {
    "learning": "L",
    "reference": "R",
    "memory": "M",
    "traffic": "T",
    "audit": "A",
    "non-finite": "NaN",
}


def _letters() -> dict[str, str]:
    """Return a letter for each scheme by its name: D, and the last of the others', or its place if taken."""
    found: dict[str, str] = {}
    for place, S in enumerate(SCHEMES):
        letter = "D" if S is DP else S.name[-1]
        found[S.name] = letter if letter not in found.values() else f"({place})"
    return found
