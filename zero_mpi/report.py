"""What rank 0 says: tables of 80 columns, and the JSON file.

Not for: measuring or judging; every number here comes from run.py's result.
"""

import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

SCHEMA = "zero_mpi.run/2"
WIDTH = 80

ORDER_OF_SUMMATION = (
    "Why exactly zero: every scheme sums block b of a unit in the order of ranks {order}, and divides "
    "once; what the owner gets is what the others receive. In floating point another order gives other bits "
    "(about 1e-7, and growing): schemes that differ in it would part, and none would be wrong."
)
REPLAYED = "Checked, not claimed: rank 0 replayed the run alone in that order and got the same bits."
NOT_REPLAYED = "That order was not checked in this run: the replay on rank 0 was left out."
APART_FROM_RING = (
    "From the same run in the ring's order (block b summed over ranks b+1, b+2, ..., b) the weights differ "
    "by up to {apart}: {why}."
)

FOOTER = (
    "The checks compare integers, rank by rank. Ranks differ by a few elements where N does not divide a "
    "unit: blocks are uneven, never padded. Counted: every byte a step hands to MPI; control is the loss. "
    "Not counted: what MPI adds to a message, and what the checks themselves gather between steps."
)

# What a verdict says: it holds, it fails, or it cannot be judged.
_HEADS = {True: "holds", False: "FAILS", None: "n/a  "}

# Where the columns of a table are many.
_SHORT = {"data parallel": "DP"}

_BANDS = ("params", "grads", "optimizer")

# What a verdict says: it holds, it fails, or it cannot be judged.
_HEADS = {True: "holds", False: "FAILS", None: "n/a  "}

# Where the columns of a table are many.
_SHORT = {"data parallel": "DP"}

_BANDS = ("params", "grads", "optimizer")

# In what order of ranks block b is summed.
ORDERS_IN_WORDS = {
    "ring": "rank b+1, b+2, ..., b",
    "reversed-ring": "rank b-1, b-2, ..., b",
    "rank-order": "rank 0, 1, ..., N-1",
    "naive": "rank 0, 1, ..., N-1",
    "recursive-halving": "a tree of halves, quarters, ...",
}


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return lines with columns aligned, the first `left` columns to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def min_max(name: str, columns: Sequence[Sequence[int]], rest: Sequence[str]) -> list[list[str]]:
    """Return one row where all ranks have the same numbers, else a row of minima and one of maxima.

    columns : for each column, one number a rank. rest : cells that only the first row has.
    """
    if all(min(column) == max(column) for column in columns):
        return [[name, *(str(column[0]) for column in columns), *rest]]
    return [
        [f"{name}, min", *(str(min(column)) for column in columns), *rest],
        ["max".rjust(len(name) + 5), *(str(max(column)) for column in columns), *("" for _ in rest)],
    ]


def header(
    settings: dict[str, Any], environment: dict[str, Any], sweep: Sequence[int] | None = None
) -> list[str]:
    """Return the lines that say what runs, with every default, and where."""
    s, e = settings, environment
    ranks = "1 rank" if e["ranks"] == 1 else f"{e['ranks']} ranks"
    hosts = "1 host" if e["hosts"] == 1 else f"{e['hosts']} hosts with {e['ranks_per_host']} ranks"
    said = {
        "model": f"{s['model']}: {s['n_params']:,} parameters in {s['units']} units, seed {s['init_seed']}",
        "data": s["data"],
        "training": "; ".join(s["training"]),
        "precision": f"{s['precision']}: {s['params_dtype']} parameters, {s['grads_dtype']} gradients, "
        "float32 optimizer",
        "on wire": f"{s['reduce_dtype']} gradients, {s['gather_dtype']} parameters; {s['reduction']}",
        "machine": f"{hosts}; {e['mpi']}; numpy {e['numpy']}; {e['blas']}, {e['blas_threads']}",
    }
    lines = [f"zero_mpi {e['zero_mpi']} on {ranks}"]
    if sweep:
        said = {"sweep": f"on {', '.join(map(str, sweep))} of them", **said}
    for name, text in said.items():
        lines += _wrapped(f"  {name:<10} ", text)
    return [*lines, ""]


def learning(result: dict[str, Any]) -> list[str]:
    """Return the table of check one, and why its zero is a zero."""
    evidence = result["learning"]
    steps, schemes = evidence["steps"], list(evidence["schemes"].values())
    rows = [["scheme", "final loss", "max |θ-θ_dp|", "steps identical", "digest of θ"]]
    for row in schemes:
        difference, identical = row["max_abs_difference"], row["identical_steps"]
        rows.append(
            [
                row["name"],
                "not finite" if row["final_loss"] is None else f"{row['final_loss']:.6f}",
                "not checked" if difference is None else _difference(difference),
                "not checked" if identical is None else f"{identical} of {steps}",
                row["theta_digest"],
            ]
        )
    lines = ["Learning", *table(rows), ""]
    lines += _by_step("loss", schemes[0]["losses"], ".4f")
    if any(norm is not None for norm in schemes[0]["grad_norms"]):
        lines += _by_step("norm", schemes[0]["grad_norms"], ".4g")
    for row in schemes[:1]:
        for step, why in row["skipped_steps"][:5]:
            lines += _wrapped("  ", f"step {step} skipped by all: {why}")
        if row["skipped_steps"]:
            text = f"{len(row['skipped_steps'])} of {steps} steps skipped; loss scale at the end "
            lines += [*_wrapped("  ", f"{text}{row['final_loss_scale']:g}"), ""]
    for row in schemes:
        if row["parting"] is not None:
            lines += [*parting(row["name"], row["parting"]), ""]
    compared = [row for row in schemes if row["max_abs_difference"] is not None]
    order = evidence["order"]
    if order and len(compared) > 1 and all(row["max_abs_difference"] == 0 for row in compared):
        replay = evidence["reference"]
        text = ORDER_OF_SUMMATION.format(order=order)
        if replay is None:
            lines += [*_wrapped("  ", f"{text} {NOT_REPLAYED}"), ""]
        elif all(row["identical_steps"] == steps for row in replay.values()):
            lines += [*_wrapped("  ", f"{text} {REPLAYED}"), ""]
    apart = evidence["max_abs_difference_from_ring"]
    if apart is not None:
        why = (
            f"{evidence['reducer']} adds in the order {order}" if order else "the library's order is its own"
        )
        lines += [*_wrapped("  ", APART_FROM_RING.format(apart=_difference(apart), why=why)), ""]
    return lines


def parting(name: str, found: dict[str, Any]) -> list[str]:
    """Return where a scheme first leaves the reference, and why."""
    what = {"gradient": "gradient", "parameters": "parameters", "replica": "copy of others' parameters"}
    holder = "held by" if found["phase"] == "replica" else "owned by"
    place = ", ".join(map(str, found["place"]))
    said = {
        "where": f"step {found['step']}, {what[found['phase']]}, unit {found['unit']}, "
        f"{found['tensor']}[{place}], {holder} rank {found['rank']}",
        "observed": f"{found['observed']:.9g} ({found['observed_bits']})",
        "expected": f"{found['expected']:.9g} ({found['expected_bits']})",
        "apart": f"{found['ulp']} ULP of {found['dtype']}; {found['differing']} of {found['numel']} elements "
        "of the unit differ",
        "class": found["cause"],
        "evidence": found["why"],
    }
    lines = [f"  {name} first parts from the reference:"]
    for key, text in said.items():
        lines += _wrapped(f"    {key:<9} ", text)
    return lines


def memory(result: dict[str, Any]) -> list[str]:
    """Return the table of resident bytes and the one of transient peaks."""
    rows = [["scheme", *_BANDS, "B/param", "formula", ""]]
    schemes = list(result["memory"].values())
    for row in schemes:
        held = [rank["held_bytes"] for rank in row["ranks"]]
        rows += min_max(
            row["name"],
            [[h[band] for h in held] for band in _BANDS],
            [
                f"{row['mean_bytes_per_param']:.4f}",
                f"{row['formula_bytes_per_param']:.4f}",
                f"= {row['formula'].replace(' ', '')}",
            ],
        )
    lines = ["Memory per rank, bytes: the three bands, from arrays that exist", *table(_left_last(rows)), ""]
    peaks = [["", *(row["name"] for row in schemes)]]
    by_rank = [[rank["transient_peak_by_kind_bytes"] for rank in row["ranks"]] for row in schemes]
    for kind in sorted({kind for ranks in by_rank for rank in ranks for kind in rank}):
        peaks.append([kind, *(_peak([rank.get(kind, 0) for rank in ranks]) for ranks in by_rank)])
    together = [[rank["transient_peak_bytes"] for rank in row["ranks"]] for row in schemes]
    peaks.append(["all at once", *(_peak(ranks) for ranks in together)])
    lines += ["Transient peak, bytes: the rank with most", *table(peaks), ""]
    process = max(result["process"], key=lambda rank: rank["os_peak_over_base_plus_ledger"])
    base, ledger, seen = (
        f"{process[key] / 1e6:.1f} MB" for key in ("base_bytes", "ledger_peak_bytes", "os_peak_bytes")
    )
    text = (
        f"A process as the OS sees it: {base} before the schemes, and their ledgers' peak {ledger}; at its "
        f"peak {seen}, {process['os_peak_over_base_plus_ledger']:.2f} times their sum (the rank that is "
        "farthest off)."
    )
    return [*lines, *_wrapped("  ", text), ""]


def traffic(result: dict[str, Any]) -> list[str]:
    """Return the tables of what a rank sends in one step: bytes and messages, and units."""
    schemes = list(result["traffic"].values())
    if not schemes[0]["counted"]:
        rows = [["scheme", "calls", "control"]]
        for row in schemes:
            keys = ("library_calls", "control_bytes")
            rows += min_max(row["name"], [[rank[key] for rank in row["ranks"]] for key in keys], [])
        return [
            "Traffic per rank and step: calls of the MPI library, bytes of control",
            *table(rows),
            "",
        ]
    sent = [["scheme", "reduce-scatter", "all-gather", "total", "messages", "control"]]
    units = [["scheme", "reduce-scatter", "all-gather", "total", "formula", ""]]
    across = [["scheme", "within a host", "across hosts"]]
    for row in schemes:
        ranks = [rank["sent_bytes"] for rank in row["ranks"]]
        columns = [[rank[name] for rank in ranks] for name in ("reduce-scatter", "all-gather")]
        columns.append([sum(rank.values()) for rank in ranks])
        columns += [[rank[key] for rank in row["ranks"]] for key in ("sent_messages", "control_bytes")]
        sent += min_max(row["name"], columns, [])
        places = ("sent_within_host_bytes", "sent_across_hosts_bytes")
        across += min_max(row["name"], [[rank[key] for rank in row["ranks"]] for key in places], [])
        mean = row["mean_units"]
        values = [mean["reduce-scatter"], mean["all-gather"], sum(mean.values()), row["formula_units"]]
        units.append([row["name"], *(f"{value:.4f}" for value in values), f"= {row['formula']}"])
    lines = [
        "Traffic per rank and step, bytes sent (messages: their number; control: bytes)",
        *table(sent),
        "",
    ]
    if any(rank["sent_across_hosts_bytes"] for row in schemes for rank in row["ranks"]):
        lines += ["Traffic per rank and step by where it goes, bytes sent", *table(across), ""]
    return [
        *lines,
        "Traffic in units of n_params x bytes of the wire dtype, mean over ranks",
        *table(_left_last(units)),
        "",
        *_wrapped("  ", FOOTER),
        "",
    ]


def audit(result: dict[str, Any]) -> list[str]:
    """Return the table of what Python's allocator saw beside the ledger; empty if no audit ran."""
    if "audit" not in result:
        return []
    rows = [["scheme", "at rest", "at the peak of a step"]]
    for row in result["audit"].values():
        kinds = ("resident_outside_bytes", "peak_outside_bytes")
        rows += min_max(row["name"], [[rank[kind] for rank in row["ranks"]] for kind in kinds], [])
    limits = next(iter(result["audit"].values()))
    return [
        "Audit: bytes that Python's allocator sees and the ledger does not",
        *table(rows),
        *_wrapped(
            "  ",
            f"Allowed: {limits['resident_limit_bytes']} at rest; {limits['peak_limit_bytes']} at the peak: "
            "the interpreter's own objects, and a gradient of activations while it is made.",
        ),
        "",
    ]


def sweep(results: dict[int, dict[str, Any]]) -> list[str]:
    """Return the tables of traffic and of memory over the numbers of ranks, measured beside the formula."""
    first = next(iter(results.values()))
    names = {key: _SHORT.get(row["name"], row["name"]) for key, row in first["traffic"].items()}

    def rows(part: str, measured: Callable[[dict[str, Any]], float], formula: str) -> list[str]:
        """Return a table of each scheme, and of the formula after the last scheme that shares it."""
        columns: list[list[str]] = [["N", *map(str, results)]]
        texts = [first[part][key]["formula"].replace(" ", "") for key in names]
        for i, (key, name) in enumerate(names.items()):
            column = [result[part][key] for result in results.values()]
            columns.append([name, *(f"{measured(row):.4f}" for row in column)])
            if texts[i] != texts[(i + 1) % len(texts)] or i == len(texts) - 1:
                columns.append([texts[i], *(f"{row[formula]:.4f}" for row in column)])
        return table(list(zip(*columns, strict=True)), left=0)

    losses = [["N", *names.values()]]
    for n, result in results.items():
        losses.append([str(n), *(f"{r['final_loss']:.6f}" for r in result["learning"]["schemes"].values())])
    return [
        "Traffic per rank and step, in units of n_params x bytes of the wire dtype,",
        "measured (mean over ranks) and, beside it, the formula",
        *rows("traffic", lambda row: sum(row["mean_units"].values()), "formula_units"),
        "",
        "Memory per rank, bytes per parameter, measured (mean over ranks) and formula",
        *rows("memory", lambda row: row["mean_bytes_per_param"], "formula_bytes_per_param"),
        "",
        "Final loss: another N sees other batches and so learns something else",
        *table(losses, left=0),
        "",
        *_wrapped("  ", FOOTER),
        "",
    ]


def verdicts(results: dict[int, dict[str, Any]]) -> list[str]:
    """Return one line for each check, wrapped; in a sweep one for each check that holds at every size."""
    lines = ["Checks"]
    several = len(results) > 1
    everywhere = [
        row["check"]
        for i, row in enumerate(next(iter(results.values()))["verdicts"])
        if several and all(result["verdicts"][i]["holds"] for result in results.values())
    ]
    for check in everywhere:
        lines += _wrapped(f"  holds  {check:<10} ", f"at N = {', '.join(map(str, results))}")
    for size, result in results.items():
        for row in result["verdicts"]:
            if row["check"] in everywhere:
                continue
            head = f"  {_HEADS[row['holds']]}  {row['check']:<10} "
            lines += _wrapped(head, (f"N = {size}: " if several else "") + row["says"])
    return lines


def print_result(results: dict[int, dict[str, Any]], quiet: bool) -> None:
    """Print results by number of ranks as tables; only the verdicts when `quiet`."""
    lines: list[str] = []
    if not quiet and len(results) > 1:
        lines = sweep(results)
    elif not quiet:
        (result,) = results.values()
        lines = [*learning(result), *memory(result), *traffic(result), *audit(result)]
    print("\n".join([*lines, *verdicts(results)]), flush=True)


class JsonFile:
    """A file that is known to be writable before the run, and is there whole after it, or not at all."""

    def __init__(self, path: str) -> None:
        # The file itself, not a link to it: what is put in place must not replace the link.
        self.path = os.path.realpath(path)
        folder = os.path.dirname(self.path)
        if os.path.isdir(self.path):
            raise ValueError(f"--json {path}: expected a file to write, got a directory")
        if os.path.exists(self.path):
            mode = os.stat(self.path).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"--json {path}: expected a regular file to write, got a device or a pipe")
            # Root may write anything; a file that says read-only is not to be written all the same.
            if not mode & 0o222 or not os.access(self.path, os.W_OK):
                raise ValueError(f"--json {path}: expected a file that can be written, got a read-only one")
            self._mode = stat.S_IMODE(mode)
        else:
            self._mode = 0o666 & ~_umask()
        try:
            handle, self._part = tempfile.mkstemp(prefix=".zero_mpi-", suffix=".json", dir=folder)
        except OSError as error:
            raise ValueError(f"--json {path}: cannot be written: {error.strerror}") from None
        os.close(handle)

    def write(self, result: dict[str, Any]) -> None:
        """Write `result` and put it in place."""
        with open(self._part, "w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, **result}, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(self._part, self._mode)
        os.replace(self._part, self.path)

    def discard(self) -> None:
        """Remove what was begun, if it was not written."""
        if os.path.exists(self._part):
            os.remove(self._part)


def complain(message: str) -> None:
    """Print one line about the user's mistake."""
    print(f"zero_mpi: error: {message}", file=sys.stderr, flush=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _difference(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return "0" if value == 0 else f"{value:.3g}"


def _by_step(name: str, values: Sequence[float | None], form: str) -> list[str]:
    """Return a line with at most five of `values`, and the steps they are of."""
    said = ("none" if value is None else format(value, form) for _, value in _evenly(values, 5))
    steps = (step for step, _ in _evenly(values, 5))
    pairs = ", ".join(f"{value} ({step})" for value, step in zip(said, steps, strict=True))
    return [f"  {name} by step: {pairs}", ""]


def _evenly(values: Sequence[Any], most: int) -> list[tuple[int, Any]]:
    last = len(values) - 1
    picked = sorted({round(i * last / (most - 1)) for i in range(most)})
    return [(i + 1, values[i]) for i in picked]


def _peak(ranks: Sequence[int]) -> str:
    return str(max(ranks))


def _left_last(rows: list[list[str]]) -> list[list[str]]:
    width = max(len(row[-1]) for row in rows)
    return [[*row[:-1], row[-1].ljust(width)] for row in rows]


def _wrapped(head: str, text: str) -> list[str]:
    lines, line = [], head
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = " " * len(head)
        line += word + " "
    return [*lines, line.rstrip()]
