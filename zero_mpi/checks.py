"""The two checks, identical learning and counted bytes, as functions that return evidence.

Not for: deciding what to print (report.py) or running anything (run.py).
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import formulas
from .comm import Communicator
from .data import MicroBatches
from .digest import digest, rows_digest
from .optim import Optimizer
from .precision import Precision, all_finite, convert, dtype_of
from .schemes import Scheme
from .schemes.base import NORM_PIECE


class Verdict(NamedTuple):
    """What a check found: whether it holds (None: it cannot be judged), and the one line that says so."""

    check: str
    holds: bool | None
    says: str


# Elements compared at a time.
_PIECE = 65536

# Check one: identical learning. Every comparison is local: a rank owns the same elements in every scheme.


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two contiguous arrays of one dtype are equal bit for bit (so NaN equals itself)."""
    if a.shape != b.shape:
        return False
    # Whole words, in pieces: a comparison of all at once takes as much memory as the array.
    words = np.dtype(f"u{a.itemsize}")
    bits = a.reshape(-1).view(words), b.reshape(-1).view(words)
    pieces = (slice(i, i + _PIECE) for i in range(0, a.size, _PIECE))
    return all(np.array_equal(bits[0][piece], bits[1][piece]) for piece in pieces)


def largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return max |a - b| in float32, 0.0 if the bits are the same; infinite where one is not a number."""
    if a.size == 0 or same_bits(a, b):
        return 0.0
    largest = []
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, a.size, _PIECE):
            wide = [x[start : start + _PIECE].astype(np.float32, copy=False) for x in (a, b)]
            largest.append(np.max(np.abs(wide[0] - wide[1])))
    # Python's max may leave a NaN out.
    difference = float(np.max(largest))
    return difference if np.isfinite(difference) else float("inf")


class Difference(NamedTuple):
    """How two schemes differ on this rank: in what it owns, and in what it holds whole."""

    owned: float
    replica: float
    identical: bool


def compare(scheme: Scheme, partner: Scheme) -> Difference:
    """Compare all that this rank owns, and its whole replicas, bit for bit with `partner`'s. Local.

    Owned are weights, 16-bit parameters, gradients and moments alike; and the norm, the loss scale and
    whether the step was skipped must be the same.

    Owners' blocks alone would hide a rank whose copy of the others' blocks is stale.
    """
    owned, replica = 0.0, 0.0
    identical = (scheme.grad_norm, scheme.scale.value, scheme.skipped) == (
        partner.grad_norm,
        partner.scale.value,
        partner.skipped,
    )
    for u in scheme.units:
        for (_, _, _, array), (_, _, _, partners_array) in zip(
            scheme.owned(u), partner.owned(u), strict=True
        ):
            identical &= same_bits(array, partners_array)
        owned = max(owned, largest_difference(scheme.owned_theta(u), partner.owned_theta(u)))
        whole, partners = scheme.replica(u), partner.replica(u)
        if whole is not None and partners is not None and not same_bits(whole, partners):
            identical = False
            wide = [x.astype(np.float32) for x in (whole, partners)]
            replica = max(replica, largest_difference(*wide))
    return Difference(owned, replica, identical)


def owns_finite(scheme: Scheme) -> bool:
    """Return whether all that this rank owns is finite: the last update is in no loss. Local.

    Gradients are not: those of a skipped step may overflow.
    """
    owned = (item for u in scheme.units for item in scheme.owned(u))
    return all(all_finite(array) for name, _, _, array in owned if name != "grads")


def difference_of_weights(scheme: Scheme, other: Scheme) -> float:
    """Return max |θ - θ_other| over what this rank owns, which may be stored whole or cut. Local."""
    pairs = ((scheme.owned_theta(u), other.owned_theta(u)) for u in scheme.units)
    return max(largest_difference(a, b) for a, b in pairs)


def replica_fingerprint(scheme: Scheme) -> int:
    """Return 64 bits that differ where what this rank holds whole differs. Local."""
    fingerprint = hashlib.blake2b(digest_size=8)
    for u in scheme.units:
        whole = scheme.replica(u)
        if whole is not None:
            fingerprint.update(whole.view(np.uint8).data)
    return int.from_bytes(fingerprint.digest(), "little")


def replicas_agree(scheme: Scheme) -> bool:
    """Return whether all ranks hold the same whole parameters. Collective; 8 control bytes a message."""
    prints = scheme.comm.allgather_scalar(replica_fingerprint(scheme), np.uint64)
    return bool(np.all(prints == prints[0]))


def theta_digest(scheme: Scheme) -> str:
    """Return the digest of all float32 weights, added up from owners' blocks. Collective; control traffic."""
    mine = sum(
        digest(scheme.owned_theta(u), scheme.blocks[u].start(scheme.comm.rank), u) for u in scheme.units
    )
    parts = scheme.comm.allgather_scalar(np.uint64(mine % 2**64), np.uint64)
    return f"{sum(int(part) for part in parts) % 2**64:016x}"


def unit_digests(scheme: Scheme) -> tuple[list[int], list[int]]:
    """Return the digests of the mean gradient and of the float32 weights, one a unit.

    Added up from owners' blocks. A frozen unit's gradient is 0. Collective; 16 control bytes a unit.
    """
    mine = np.zeros((2, len(scheme.units)), np.uint64)
    for u in scheme.units:
        start = scheme.blocks[u].start(scheme.comm.rank)
        mine[1, u] = digest(scheme.owned_theta(u), start, u)
        for name, low, _, array in scheme.owned(u):
            if name == "grads":
                mine[0, u] = digest(array, low, u)
    # Unsigned integers wrap around, which is what a sum modulo 2^64 does.
    grads, params = scheme.comm.allgather_array(mine.reshape(-1)).sum(axis=0, dtype=np.uint64).reshape(2, -1)
    return [int(x) for x in grads], [int(x) for x in params]


def batch_digest(micro_batches: MicroBatches) -> int:
    """Return the digest of one rank's rows of a step, the same in any order. Local."""
    return sum(rows_digest(x, y) for x, y in micro_batches) % 2**64


def data_digest(comm: Communicator, micro_batches: MicroBatches) -> int:
    """Return the digest of all rows of a step, whoever has them. Collective; 8 control bytes a message."""
    parts = comm.allgather_scalar(np.uint64(batch_digest(micro_batches)), np.uint64)
    return sum(int(part) for part in parts) % 2**64


def matches_reference(scheme: Scheme, theta: np.ndarray, expected: np.ndarray) -> tuple[bool, float]:
    """Compare gathered weights, and rank 0's replica, with the reference's. For rank 0; local.

    Parameters
    ----------
    theta, expected : float32, shape (n_params,), gathered from the scheme, and the reference's.
    """
    identical, start = same_bits(theta, expected), 0
    for u, numel in enumerate(scheme.model.units):
        whole = scheme.replica(u)
        if whole is not None:
            stored = np.empty(numel, dtype_of(scheme.precision.params))
            convert(expected[start : start + numel], stored)
            identical &= same_bits(whole, stored)
        start += numel
    return identical, largest_difference(theta, expected)


# Check two: measured against predicted. Integers, rank by rank.


def itemsizes(p: Precision, optimizer: Optimizer) -> formulas.Itemsizes:
    """Return the bytes an element takes at rest and on the wire, by the names of dtypes."""
    slots = len(optimizer.slots) + p.master
    sizes = [dtype_of(name).itemsize for name in (p.params, p.grads, p.reduce, p.gather)]
    return formulas.Itemsizes(sizes[0], sizes[1], 4 * slots, sizes[2], sizes[3])


def workload(scheme: Scheme) -> formulas.Workload:
    """Return what the formulas have to know of a scheme."""
    return formulas.Workload(
        units=tuple(scheme.model.units),
        items=itemsizes(scheme.precision, scheme.optimizer),
        size=scheme.comm.size,
        accumulate=scheme.training.accumulate,
        reduce_every=scheme.training.reduce_every,
        frozen=tuple(scheme.training.freeze),
        reducer=scheme.reducer.name,
        updated=not scheme.skipped,
    )


def promised(scheme: Scheme) -> formulas.Workload:
    """Return the workload whose bytes the scheme must send: those of the algorithm it is held to."""
    return workload(scheme)._replace(reducer=scheme.reducer.held_to or "ring")


def memory_evidence(scheme: Scheme, claim: formulas.Claim) -> dict[str, Any]:
    """Return what this rank holds, in bytes, and what the formula says it holds. Local."""
    ledger, work = scheme.ledger, workload(scheme)
    expected = formulas.resident_bytes(claim, work, scheme.comm.rank)
    limits: dict[str, int | None] = {**formulas.transient_peak_bytes(claim, work)}
    # Not the scheme's: what the optimizer and the norm work in, and what the model saves, which grows with
    # the batch and has no limit.
    limits["optimizer scratch"] = 4 * scheme.optimizer.scratch_numel(work.largest)
    limits["norm scratch"] = 8 * NORM_PIECE
    limits["activations"] = None
    return {
        "held_bytes": {band: ledger.alive_bytes(band) for band in expected},
        "peak_bytes": {band: ledger.peak_bytes(band) for band in expected},
        "formula_bytes": expected,
        "transient_bytes": ledger.transient_bytes,
        "transient_peak_bytes": ledger.transient_peak_bytes,
        "transient_peak_by_kind_bytes": ledger.transient_peaks(),
        "transient_limit_by_kind_bytes": limits,
        "total_peak_bytes": ledger.total_peak_bytes,
        "padding_bytes": ledger.padding_bytes,
    }


def memory_fault(evidence: dict[str, Any]) -> str:
    """Return what is wrong with one rank's memory, in words, or an empty string.

    Bands are the formula's now and at their peak; transients are gone between steps, of known kinds, and
    never more than one unit at a time.
    """
    for band, expected in evidence["formula_bytes"].items():
        held, peak = evidence["held_bytes"][band], evidence["peak_bytes"][band]
        if held != expected:
            return f"{band}: holds {held} B, formula {expected} B"
        if peak != expected:
            return f"{band}: held {peak} B within a step, formula {expected} B"
    if evidence["transient_bytes"]:
        return f"{evidence['transient_bytes']} B of transient arrays outlive the step"
    for kind, peak in evidence["transient_peak_by_kind_bytes"].items():
        limits = evidence["transient_limit_by_kind_bytes"]
        if kind not in limits:
            return f"{kind}: peak {peak} B of a kind that no formula knows"
        limit = limits[kind]
        if limit is not None and peak > limit:
            return f"{kind}: peak {peak} B, one unit at a time takes {limit} B"
    return ""


def traffic_evidence(scheme: Scheme, claim: formulas.Claim, hosts: Sequence[str]) -> dict[str, Any]:
    """Return what this rank sent in the last step, in bytes, and what the formula says it sends. Local.

    hosts : of each rank.
    """
    rank, traffic, work = scheme.comm.rank, scheme.step_traffic, promised(scheme)
    expected = formulas.sent_bytes(claim, work, rank)
    model, control = traffic.total(traffic="model"), traffic.total(traffic="control")
    by_name = {name: traffic.total(traffic="model", collective=name) for name in expected}
    sent = {name: count.sent_bytes for name, count in by_name.items()}
    sent["other"] = model.sent_bytes - sum(sent.values())
    within = sum(
        traffic.total(traffic="model", peer=peer).sent_bytes
        for peer, host in enumerate(hosts)
        if host == hosts[rank]
    )
    return {
        "counted": scheme.reducer.held_to is not None,
        "updated": not scheme.skipped,
        "sent_bytes": sent,
        "formula_bytes": {**expected, "other": 0},
        "sent_messages": model.sent_messages,
        "formula_messages": formulas.sent_messages(claim, work, rank, scheme.comm.max_message_bytes),
        "received_bytes": model.received_bytes,
        "sent_within_host_bytes": within,
        "sent_across_hosts_bytes": model.sent_bytes - within,
        "control_bytes": control.sent_bytes,
        "control_messages": control.sent_messages,
        "control_formula_bytes": formulas.control_sent(work)[0],
        "control_formula_messages": formulas.control_sent(work)[1],
        "sent_units": {name: count.sent_elements / work.n_params for name, count in by_name.items()},
        "library_calls": sum(traffic.calls.values()),
    }


def traffic_fault(evidence: dict[str, Any]) -> str:
    """Return what is wrong with one rank's traffic, in words, or an empty string."""
    if evidence["counted"]:
        for name, sent in evidence["sent_bytes"].items():
            if sent != evidence["formula_bytes"][name]:
                return f"{name}: sent {sent} B, formula {evidence['formula_bytes'][name]} B"
        if evidence["sent_messages"] != evidence["formula_messages"]:
            return f"sent {evidence['sent_messages']} messages, formula {evidence['formula_messages']}"
    # Else model bytes could travel under another name.
    control = [evidence["control_bytes"], evidence["control_messages"]]
    expected = [evidence["control_formula_bytes"], evidence["control_formula_messages"]]
    if control != expected:
        return (
            f"control: sent {control[0]} B in {control[1]} messages, formula {expected[0]} B in {expected[1]}"
        )
    return ""
