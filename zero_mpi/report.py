"""What rank 0 says: tables of 80 columns, and the JSON file.

Not for: measuring or judging; every number here comes from run.py's result.
"""

import errno
import json
import math
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from .comm import Communicator

SCHEMA = "zero_mpi.run/2"
WIDTH = 80

ORDER_OF_SUMMATION = (
    "Why exactly zero: every scheme sums block b of a unit in the order {order}, and divides "
    "once; what the owner gets is what the others receive. In floating point another order gives other bits "
    "(about 1e-7, and growing): schemes that differ in it would part, and none would be wrong."
)
REPLAYED = "Checked, not claimed: rank 0 replayed the run alone in that order and got the same bits."
EXACT_IN_ANY = (
    "(Which cannot tell orders apart where sums are exact in any, as those of 16-bit gradients in float32 "
    "almost always are: --precision fp32 can.)"
)
NOT_REPLAYED = "That order was not checked in this run: the replay on rank 0 was left out."
APART_FROM_RING = (
    "From the same run in the ring's order (block b summed over ranks b+1, b+2, ..., b) the weights differ "
    "by up to {apart}: {why}."
)
AS_THE_RING = (
    "The same run in the ring's order (block b summed over ranks b+1, b+2, ..., b) gives the same weights, "
    "though {why}. One or two ranks have no other order; of three, the reversed ring adds the same two "
    "first; sums of 16-bit gradients in float32 are almost always exact in any; and a step that was skipped "
    "changes nothing."
)
RING_NOT_FINITE = (
    "In the ring's order (block b summed over ranks b+1, b+2, ..., b) the same run ends in a sum that is not "
    "finite: {why}."
)

LIBRARY_FOOTER = "Not counted: bytes in the MPI library's own collectives; it keeps them to itself."
FOOTER = (
    "The checks compare integers, rank by rank. Ranks differ by a few elements where N does not divide a "
    "unit: blocks are uneven, never padded. Counted: every byte a step hands to MPI; control is what ranks "
    "agree on. Not counted: what MPI adds to a message, and what the checks themselves gather between steps."
)

# What a verdict says: it holds, it fails, or it cannot be judged.
_HEADS = {True: "holds", False: "FAILS", None: "n/a  "}

# Where the columns of a table are many.
_SHORT = {"data parallel": "DP"}

_BANDS = ("params", "grads", "optimizer")


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


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def header(
    settings: dict[str, Any], environment: dict[str, Any], sweep: Sequence[int] | None = None
) -> list[str]:
    """Return the lines that say what runs, with every default, and where."""
    s, e = settings, environment
    hosts = counted(e["hosts"], "host")
    if e["hosts"] > 1:
        each = e["ranks_per_host"]
        hosts += f" with {each} ranks" if "," in each else f", {counted(int(each.split()[0]), 'rank')} each"
    checks = [f"{'schemes' if len(s['schemes']) > 1 else 'ranks'} against each other"] * s["check"]
    checks += ["replay on rank 0"] * s["reference"] + ["audit of memory"] * s["audit_memory"]
    checks.append("memory against formulas" if s["reduction"] == "library" else "bytes against formulas")
    said = {
        "schemes": ", ".join(s["schemes"]),
        "model": f"{s['model']}: {s['n_params']:,} parameters in {counted(s['units'], 'unit')}, "
        f"seed {s['init_seed']}",
        "data": s["data"],
        "training": "; ".join(s["training"]),
        "precision": f"{s['precision']}: {s['params_dtype']} parameters, {s['grads_dtype']} gradients, "
        "float32 optimizer",
        "on wire": f"{s['reduce_dtype']} gradients, {s['gather_dtype']} parameters; {s['reduction']}",
        "checks": ", ".join(checks),
        "machine": f"{hosts}; {e['mpi']}; numpy {e['numpy']}; {e['blas']}, {e['blas_threads']}",
    }
    if s["inject"]:
        said["fault"] = f"{s['inject']}, made on purpose"
    lines = [f"zero_mpi {e['zero_mpi']} on {counted(e['ranks'], 'rank')}"]
    if sweep:
        said = {"sweep": f"on {', '.join(map(str, sweep))} of them", **said}
    for name, text in said.items():
        lines += wrapped(f"  {name:<10} ", text)
    return [*lines, ""]


def learning(result: dict[str, Any]) -> list[str]:
    """Return the table of check one, and why its zero is a zero."""
    evidence = result["learning"]
    steps, schemes = evidence["steps"], list(evidence["schemes"].values())
    rows = [["scheme", "final loss", "max |θ-θ_dp|", "steps identical", "digest of θ"]]
    for row in schemes:
        apart, identical = row["max_abs_difference"], row["identical_steps"]
        rows.append(
            [
                row["name"],
                _final(row),
                "not checked" if apart is None else difference(apart),
                "not checked" if identical is None else f"{identical} of {steps}",
                row["theta_digest"],
            ]
        )
    lines = ["Learning", *table(rows), ""]
    first, *_ = evidence["schemes"]
    elsewhere = [
        f"{row['name']} with {evidence['schemes'][row['compared_with']]['name']}"
        for key, row in evidence["schemes"].items()
        if row["compared_with"] not in (None, first, key)
    ]
    if elsewhere:
        lines += [*wrapped("  ", f"Steps identical: {', '.join(elsewhere)}."), ""]
    # One scheme's stand for all, unless others have their own.
    apart = any(row["same_as_first"] is False for row in schemes)
    whose = f" of {schemes[0]['name']}" if apart else ""
    lines += _by_step(f"loss{whose}", schemes[0]["losses"])
    if any(norm is not None for norm in schemes[0]["grad_norms"]):
        lines += _by_step(f"norm{whose}", schemes[0]["grad_norms"])
    lines += _skips(evidence)
    same: dict[str, list[str]] = {}
    for row in schemes:
        if row["parting"] is not None:
            same.setdefault("\n".join(parting(row["parting"])), []).append(row["name"])
    for text, names in same.items():
        verb = "parts" if len(names) == 1 else "part"
        lines += [*wrapped("  ", f"{', '.join(names)} first {verb} from the reference:"), text, ""]
    compared = [row for row in schemes if row["max_abs_difference"] is not None]
    order = evidence["order"]
    alike = all(row["max_abs_difference"] == 0 and row["same_as_first"] for row in compared)
    if order and len(compared) > 1 and alike:
        replay = evidence["reference"]
        text = ORDER_OF_SUMMATION.format(order=order)
        if replay is None:
            lines += [*wrapped("  ", f"{text} {NOT_REPLAYED}"), ""]
        elif all(row["identical_steps"] == steps for row in replay.values()):
            said = f"{text} {REPLAYED}"
            if evidence["grads_dtype"] != "float32":
                said += f" {EXACT_IN_ANY}"
            lines += [*wrapped("  ", said), ""]
    if evidence["max_abs_difference_from_ring"] is not None:
        lines += [*wrapped("  ", from_ring(evidence)), ""]
    return lines


def from_ring(evidence: dict[str, Any]) -> str:
    """Return by how much another order of summation changed the weights, and why."""
    apart = evidence["max_abs_difference_from_ring"]
    text = AS_THE_RING if apart == 0 else APART_FROM_RING
    if isinstance(apart, str):
        text = RING_NOT_FINITE
    return text.format(apart=difference(apart), why=_other_order(evidence))


def _other_order(evidence: dict[str, Any]) -> str:
    if not evidence["order"]:
        return "the library's order is its own"
    return f"{evidence['reducer']} adds in the order {evidence['order']}"


def _skips(evidence: dict[str, Any], where: str = "") -> list[str]:
    """Return which schemes skipped which steps, those that did alike together."""
    alike: dict[str, list[str]] = {}
    for row in evidence["schemes"].values():
        if row["skipped_steps"]:
            alike.setdefault("\n".join(skipped(row, evidence["steps"])), []).append(row["name"])
    lines: list[str] = []
    for text, names in alike.items():
        lines += [*wrapped("  ", f"{where}{', '.join(names)} skipped, on all ranks alike:"), text, ""]
    return lines


def skipped(row: dict[str, Any], steps: int) -> list[str]:
    """Return which steps a scheme skipped, the first five, and why."""
    lines: list[str] = []
    for step, why in row["skipped_steps"][:5]:
        lines += wrapped(f"    step {step:<4} ", why)
    number = len(row["skipped_steps"])
    return [
        *lines,
        f"    {number} of {counted(steps, 'step')}; loss scale at the end {row['final_loss_scale']:g}",
    ]


def parting(found: dict[str, Any]) -> list[str]:
    """Return where a scheme first leaves the reference, and why."""
    what = {"replica": "copy of the parameters", "optimizer": "optimizer state"}
    holder = "held by" if found["phase"] == "replica" else "owned by"
    place = ", ".join(map(str, found["place"]))
    said = {
        "where": f"step {found['step']}, {what.get(found['phase'], found['phase'])}, unit {found['unit']}, "
        f"{found['tensor']}[{place}], {holder} rank {found['rank']}",
        "observed": f"{found['observed']:.9g} ({found['observed_bits']})",
        "expected": f"{found['expected']:.9g} ({found['expected_bits']})",
        "apart": f"{found['ulp']} ULP of {found['dtype']}; {found['differing']} of {found['numel']} elements "
        "of the unit differ",
        "class": found["cause"],
        "evidence": found["why"],
    }
    lines: list[str] = []
    for key, text in said.items():
        lines += wrapped(f"    {key:<9} ", text)
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
    lines = ["Memory per rank, bytes: the three bands, from arrays that exist", *_with_formulas(rows), ""]
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
    return [*lines, *wrapped("  ", text), ""]


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
            *_without_update(result),
            *wrapped("  ", LIBRARY_FOOTER),
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
        formula = row["formula"] if row["formula"].startswith(">") else f"= {row['formula']}"
        units.append([row["name"], *(f"{value:.4f}" for value in values), formula])
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
        *_with_formulas(units),
        "",
        *_without_update(result),
        *wrapped("  ", FOOTER),
        "",
    ]


def _without_update(result: dict[str, Any], where: str = "") -> list[str]:
    """Return what is to be said of schemes that skipped every step: they send less than they would."""
    names = [row["name"] for row in result["traffic"].values() if row["skipped_all_gather"]]
    if not names:
        return []
    text = f"{where}{', '.join(names)} skipped every step: without an update no new parameters are gathered."
    return [*wrapped("  ", text), ""]


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
        *wrapped(
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
        texts = [[result[part][key]["formula"] for result in results.values()] for key in names]
        for i, (key, name) in enumerate(names.items()):
            column = [result[part][key] for result in results.values()]
            columns.append([name, *(f"{measured(row):.4f}" for row in column)])
            if i == len(texts) - 1 or texts[i] != texts[i + 1]:
                # Some orders of summation send more where N is no power of two: no one formula is true then.
                title = texts[i][0].replace(" ", "")
                if len(set(texts[i])) > 1 or len(title) > 9:
                    title = "formula"
                columns.append([title, *(f"{row[formula]:.4f}" for row in column)])
        return table(list(zip(*columns, strict=True)), left=0)

    losses = [["N", *names.values()]]
    for n, result in results.items():
        losses.append([str(n), *(_final(row) for row in result["learning"]["schemes"].values())])
    traffic = [
        "Traffic per rank and step, in units of n_params x bytes of the wire dtype,",
        "measured (mean over ranks) and, beside it, the formula",
        *rows("traffic", lambda row: sum(row["mean_units"].values()), "formula_units"),
        "",
    ]
    footer = FOOTER
    if not all(row["counted"] for row in first["traffic"].values()):
        footer = LIBRARY_FOOTER
        calls = [["N", *names.values()]]
        for n, result in results.items():
            most = [max(rank["library_calls"] for rank in result["traffic"][key]["ranks"]) for key in names]
            calls.append([str(n), *map(str, most)])
        traffic = ["Traffic per rank and step: calls of the MPI library", *table(calls, left=0), ""]
    said: list[str] = []
    for n, result in results.items():
        where = f"N = {n}: "
        said += [*_skips(result["learning"], where), *_without_update(result, where)]
    return [
        *traffic,
        *_across_hosts(results, names),
        "Memory per rank, bytes per parameter, measured (mean over ranks) and formula",
        *rows("memory", lambda row: row["mean_bytes_per_param"], "formula_bytes_per_param"),
        "",
        "Final loss: another N sees other batches and so learns something else",
        *table(losses, left=0),
        "",
        *_apart_from_ring(results),
        *said,
        *wrapped("  ", footer),
        "",
    ]


def _across_hosts(results: dict[int, dict[str, Any]], names: dict[str, str]) -> list[str]:
    """Return the table of what leaves a host, over the numbers of ranks; nothing where nothing does."""
    rows = [["N", *names.values()]]
    for n, result in results.items():
        ranks = [result["traffic"][key]["ranks"] for key in names]
        rows.append([str(n), *(_peak([rank["sent_across_hosts_bytes"] for rank in each]) for each in ranks)])
    if all(cell == "0" for row in rows[1:] for cell in row[1:]):
        return []
    return [
        "Traffic per rank and step that leaves its host, bytes: the rank with most",
        *table(rows, left=0),
        "",
    ]


def _apart_from_ring(results: dict[int, dict[str, Any]]) -> list[str]:
    """Return the table of how far another order of summation is from the ring's, and why; nothing for it."""
    evidence = [result["learning"] for result in results.values()]
    apart = [row["max_abs_difference_from_ring"] for row in evidence]
    if None in apart:
        return []
    rows = [["N", "max |θ-θ_ring|"], *([str(n), difference(d)] for n, d in zip(results, apart, strict=True))]
    head = f"Beside the same run in the ring's order, b+1, b+2, ..., b: {_other_order(evidence[0])}"
    return [*wrapped("", head), *table(rows, left=0), ""]


def verdicts(results: dict[int, dict[str, Any]]) -> list[str]:
    """Return one line for each check, wrapped; in a sweep one for each check that holds at every size."""
    lines = ["Checks"]
    several = len(results) > 1
    everywhere = [
        row["check"]
        for i, row in enumerate(next(iter(results.values()))["verdicts"])
        if several
        and all(result["verdicts"][i]["holds"] for result in results.values())
        and not (row["check"] == "learning" and any(map(_has_more_to_say, results.values())))
    ]
    for check in everywhere:
        lines += wrapped(f"  holds  {check:<10} ", f"at N = {', '.join(map(str, results))}")
    for size, result in results.items():
        for row in result["verdicts"]:
            if row["check"] in everywhere:
                continue
            head = f"  {_HEADS[row['holds']]}  {row['check']:<10} "
            lines += wrapped(head, (f"N = {size}: " if several else "") + row["says"])
    return lines


def _has_more_to_say(result: dict[str, Any]) -> bool:
    """Return whether schemes that hold are not all the same, or skipped steps: the verdict says why."""
    rows = result["learning"]["schemes"].values()
    return any(row["same_as_first"] is False or row["skipped_steps"] for row in rows)


def losses_so_far(losses: dict[str, list[float]]) -> list[str]:
    """Return the table of losses by scheme up to a failure; nothing if no step was finished."""
    done = max(map(len, losses.values()), default=0)
    if not done:
        return []
    rows = [["step", *losses]]
    for step, _ in _evenly([0.0] * done, 10):
        rows.append([str(step), *(_loss(values[step - 1], 6) for values in losses.values())])
    return [f"Loss by step, {counted(done, 'step')} before the failure", *table(rows, left=0), ""]


def result_lines(results: dict[int, dict[str, Any]], quiet: bool) -> list[str]:
    """Return results by number of ranks as tables; only the verdicts when `quiet`."""
    lines: list[str] = []
    if not quiet and len(results) > 1:
        lines = sweep(results)
    elif not quiet:
        (result,) = results.values()
        lines = [*learning(result), *memory(result), *traffic(result), *audit(result)]
    return [*lines, *verdicts(results)]


class JsonFile:
    """A file that is known to be writable before the run, and is there whole after it, or not at all.

    Until `write` nothing is left on the disk, so that no end of the job leaves a file begun.
    """

    def __init__(self, path: str, option: str = "--json") -> None:
        self._option = option
        if not path:
            raise ValueError(f"{option}: expected a file to write, got an empty name")
        # The file itself, not a link to it: what is put in place must not replace the link.
        self.path = os.path.realpath(path)
        if os.path.isdir(self.path):
            raise ValueError(f"{option} {path}: expected a file to write, got a directory")
        there = os.path.exists(self.path)
        if there:
            mode = os.stat(self.path).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError(f"{option} {path}: expected a regular file to write, got a device or a pipe")
            # Root may write anything; a file that says read-only is not to be written all the same.
            if not mode & 0o222 or not os.access(self.path, os.W_OK):
                raise ValueError(f"{option} {path}: expected a file that can be written, got a read-only one")
            self._mode = stat.S_IMODE(mode)
        else:
            self._mode = 0o666 & ~_umask()
        try:
            # What `write` will do: a file beside it, of a name of its own, that is given this name.
            if not there:
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
                os.remove(self.path)
            self._remove(self._begin())
        except OSError as error:
            raise ValueError(f"{option} {path}: cannot be written: {error.strerror}") from None

    def write(self, result: dict[str, Any]) -> str:
        """Write `result` and put it in place; return what went wrong, or an empty string.

        A number that is not finite becomes null.
        """
        part = ""
        try:
            part = self._begin()
            with open(part, "w", encoding="utf-8") as file:
                json.dump(_finite(result), file, indent=1, allow_nan=False)
                file.write("\n")
            os.chmod(part, self._mode)
            os.replace(part, self.path)
        except OSError as error:
            return f"{self._option} {self.path}: {error.strerror}"
        finally:
            if part:
                self._remove(part)
        return ""

    def _begin(self) -> str:
        folder = os.path.dirname(self.path)
        if not os.stat(folder).st_mode & 0o222:
            # Root may write here, too.
            raise PermissionError(errno.EACCES, "its directory is read-only")
        handle, part = tempfile.mkstemp(prefix=".zero_mpi-", suffix=".json", dir=folder)
        os.close(handle)
        return part

    def _remove(self, part: str) -> None:
        # Gone where it was put in place.
        with suppress(OSError):
            os.remove(part)


def _finite(value: Any) -> Any:
    """Return `value` as JSON can hold it: null for a number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def say(lines: Sequence[str]) -> str:
    """Print lines at once; return what went wrong, or an empty string.

    A reader that has gone, such as ``head``, has what it wanted: that is nothing wrong.
    """
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:
        # What is still buffered must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return "" if isinstance(error, BrokenPipeError) else f"standard output: {error.strerror}"
    return ""


def complain_of(wrong: Sequence[str]) -> bool:
    """Say in one line what could not be written, if anything; return whether there was any."""
    said = "; ".join(w for w in dict.fromkeys(wrong) if w)
    if said:
        complain(f"cannot be written: {said}")
    return bool(said)


def finish(comm: Communicator, code: int, wrong: Sequence[str]) -> int:
    """Say on rank 0 what went `wrong` with output; return the exit code for all. Collective.

    Parameters
    ----------
    code : rank 0's, of what was done; where that is well, output that was lost makes it 2. wrong : what
        `say` and `JsonFile.write` returned.
    """
    if comm.rank == 0 and complain_of(wrong):
        code = code or 2
    return int(comm.allgather_scalar(code, np.int64)[0])


def complain(message: str) -> None:
    """Print one line about what is wrong, whatever characters a file's name has."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    with suppress(OSError):
        print(f"zero_mpi: error: {line}", file=sys.stderr, flush=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _loss(value: float, digits: int) -> str:
    """Return a loss with so many digits, in the form that does not fill the line."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.{digits}e}"


def _final(row: dict[str, Any]) -> str:
    """Return a scheme's last loss, which may be one of a skipped step."""
    return "not finite" if row["final_loss"] is None else _loss(row["final_loss"], 6)


def difference(value: float | str) -> str:
    """Return a largest difference as tables print it: 0 only where it is exactly zero."""
    if isinstance(value, str):
        return value
    return "0" if value == 0 else f"{value:.3g}"


def _by_step(name: str, values: Sequence[float | None]) -> list[str]:
    """Return lines with at most five of `values`, and the steps they are of."""
    said = [f"{'none' if v is None else _loss(v, 4)} ({step})" for step, v in _evenly(values, 5)]
    return [*wrapped(f"  {name} by step: ", ", ".join(said)), ""]


def _evenly(values: Sequence[Any], most: int) -> list[tuple[int, Any]]:
    last = len(values) - 1
    picked = sorted({round(i * last / (most - 1)) for i in range(most)})
    return [(i + 1, values[i]) for i in picked]


def _peak(ranks: Sequence[int]) -> str:
    return str(max(ranks))


def _with_formulas(rows: list[list[str]]) -> list[str]:
    """Return the table of rows that end with a formula, each to the left; below it where it would not fit."""
    width = max(len(row[-1]) for row in rows)
    lines = table([[*row[:-1], row[-1].ljust(width)] for row in rows])
    if max(map(len, lines)) <= WIDTH:
        return lines
    return [*table([row[:-1] for row in rows]), *(f"  {row[0]}: {row[-1]}" for row in rows[1:] if row[-1])]


def wrapped(head: str, text: str) -> list[str]:
    """Return `text` behind `head` in lines that fit, the others indented as far."""
    lines, line = [], head
    room = WIDTH - len(head) - 1
    words = [word[i : i + room] for word in text.split() for i in range(0, len(word), room)]
    for word in words:
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = " " * len(head)
        line += word + " "
    return [*lines, line.rstrip()]
