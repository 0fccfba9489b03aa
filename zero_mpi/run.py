"""Step schemes in lockstep on the same batches, and collect the evidence of both checks.

Not for: arguments (cli.py), printing (report.py) or judging a single rank (checks.py).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checks, formulas
from .checks import Verdict
from .comm import Communicator, SharedMistake
from .data import Batch, Data
from .engine import NotFinite
from .memory import Audit, Ledger
from .model import Model
from .optim import Adam
from .precision import Precision
from .reference import Reference
from .ring import Ring
from .schemes import SCHEMES, Scheme

# What an audit lets pass. At rest: a handful of scalars. At the peak of a step: the interpreter's own objects
# made in it, which grow with the units, and once more what activations take (a gradient of activations while
# it is being made).
AUDIT_RESIDENT_BYTES = 1024
AUDIT_PEAK_BYTES = 48 * 1024
AUDIT_PEAK_BYTES_A_UNIT = 2048


@dataclass(frozen=True)
class Settings:
    """What a run trains, and how much of it is checked.

    steps : at most so many; None for as many as the data has.
    check : compare schemes with data parallel. reference : replay the run on rank 0 alone, too.
    """

    model: Model
    data: Data
    precision: Precision
    optimizer: Adam
    init_seed: int = 0
    steps: int | None = 10
    reducer: Callable[[Communicator, Ledger], Any] = Ring
    check: bool = True
    reference: bool = True
    audit_memory: bool = False

    def build(self, S: type[Scheme], comm: Communicator) -> Scheme:
        """Return a scheme with these settings. Collective."""
        return S(
            self.model,
            comm,
            precision=self.precision,
            optimizer=self.optimizer,
            init_seed=self.init_seed,
            reducer=self.reducer,
        )


def run(comm: Communicator, settings: Settings, schemes: Sequence[type[Scheme]]) -> dict[str, Any]:
    """Train each of `schemes` and return the evidence, the same on every rank. Collective.

    Returns
    -------
    dict that JSON can hold, with the keys "learning", "memory", "traffic", "audit" and "verdicts"; numbers
    have their unit in the key's name. Lists called "ranks" have one entry for each rank.

    Raises
    ------
    SharedMistake : the ranks do not share the settings; NotFinite : a loss is not finite.
    """
    trained = [settings.build(S, comm) for S in schemes]
    lockstep = _Lockstep(comm, settings, trained)
    # What overflows is judged below, once and for all ranks, not warned of by each.
    with np.errstate(over="ignore", invalid="ignore"):
        for batches in itertools.islice(settings.data.global_batches(comm.size), settings.steps):
            lockstep.step(batches)
    for scheme in trained:
        finite = comm.allgather_scalar(checks.owns_finite(scheme), np.uint8)
        if not finite.all():
            failure = NotFinite(
                f"weights: expected finite numbers, got NaN or infinity on rank {int(np.argmin(finite))} "
                f"after step {lockstep.steps} of {scheme.name}"
            )
            failure.losses = lockstep.losses
            raise failure
    learning = lockstep.learning()
    memory = {s.key: _memory(s, lockstep.memory_faults.get(s.key, "")) for s in trained}
    traffic = {s.key: _traffic(s, lockstep.traffic_faults.get(s.key, "")) for s in trained}
    verdicts = _learning_verdicts(learning, settings) if settings.check else []
    verdicts.append(_fault_verdict("memory", "bytes held", memory))
    verdicts.append(_fault_verdict("traffic", "bytes sent", traffic))
    result: dict[str, Any] = {"learning": learning, "memory": memory, "traffic": traffic}
    if settings.audit_memory:
        del lockstep, trained
        result["audit"] = {
            S.key: _audit(comm, settings, S, memory[S.key]["ranks"][comm.rank]) for S in schemes
        }
        verdicts.append(_fault_verdict("audit", "the allocator and the ledger", result["audit"]))
    result["verdicts"] = [verdict._asdict() for verdict in verdicts]
    return result


def run_on(
    comm: Communicator, size: int, settings: Settings, schemes: Sequence[type[Scheme]]
) -> dict[str, Any]:
    """Do `run` on the first `size` ranks of `comm` while the others sleep. Collective.

    Returns
    -------
    the result of `run` on the ranks that took part; only its "verdicts" on the others.
    """
    if size == comm.size:
        return run(comm, settings, schemes)
    part = comm.split(0 if comm.rank < size else None)
    result: dict[str, Any] = {"verdicts": []}
    failure, words = "", ""
    losses: dict[str, list[float]] = {}
    with comm.root_works():
        if part is not None:
            try:
                result = run(part, settings, schemes)
            except (SharedMistake, NotFinite) as error:
                # All that took part raise it; those that sleep have to be told.
                failure, words = type(error).__name__, f"N = {size}: {error}"
                losses = getattr(error, "losses", {})
            part.free()
    failure, words, losses, verdicts = comm.allgather_object([failure, words, losses, result["verdicts"]])[0]
    if failure == "NotFinite":
        reached = NotFinite(words)
        reached.losses = losses
        raise reached
    if failure:
        raise SharedMistake(words)
    return {**result, "verdicts": verdicts}


class _Lockstep:
    """Several schemes, stepped in turn on the same batches, so that the first step that parts is known."""

    def __init__(self, comm: Communicator, settings: Settings, trained: list[Scheme]) -> None:
        self.comm, self.settings, self.trained = comm, settings, trained
        self.losses: dict[str, list[float]] = {s.key: [] for s in trained}
        self.partings: dict[str, dict[int, float]] = {s.key: {} for s in trained}
        self.replica_steps: dict[str, list[int]] = {s.key: [] for s in trained}
        self.reference_partings: dict[int, float] = {}
        self.memory_faults: dict[str, str] = {}
        self.traffic_faults: dict[str, str] = {}
        self.steps = 0
        # What the others are compared with: data parallel, where it is there.
        self.partner = trained[0] if settings.check else None
        self.reference = None
        if self.partner is not None and settings.reference and comm.rank == 0:
            self.reference = Reference(
                settings.model, comm.size, settings.precision, settings.optimizer, settings.init_seed
            )

    def step(self, batches: Sequence[Batch]) -> None:
        self.steps += 1
        for scheme in self.trained:
            try:
                self.losses[scheme.key].append(scheme.step(batches[self.comm.rank]))
            except NotFinite as error:
                error.losses = {key: losses[: self.steps - 1] for key, losses in self.losses.items()}
                raise
            claim = SCHEMES[type(scheme)]
            for faults, fault in (
                (self.memory_faults, checks.memory_fault(checks.memory_evidence(scheme, claim))),
                (self.traffic_faults, checks.traffic_fault(checks.traffic_evidence(scheme, claim))),
            ):
                if fault and scheme.key not in faults:
                    faults[scheme.key] = f"step {self.steps}: {fault}"
        if self.partner is None:
            return
        for scheme in self.trained:
            parting = checks.compare(scheme, self.partner)
            if not parting.identical:
                self.partings[scheme.key][self.steps] = max(parting.owned, parting.replica)
            if not checks.replicas_agree(scheme):
                self.replica_steps[scheme.key].append(self.steps)
        if self.settings.reference:
            self._replay(batches)

    def _replay(self, batches: Sequence[Batch]) -> None:
        scheme = self.trained[0]
        theta = scheme.full_theta()
        with self.comm.root_works():
            if self.reference is not None and theta is not None:
                loss = self.reference.step(batches)
                identical, difference = checks.matches_reference(scheme, theta, self.reference.theta)
                if not identical or loss != self.losses[scheme.key][-1]:
                    self.reference_partings[self.steps] = difference

    def learning(self) -> dict[str, Any]:
        """Return the evidence of check one, gathered from all ranks. Collective."""
        rows = self.comm.allgather_object(
            {
                "partings": {key: list(found.items()) for key, found in self.partings.items()},
                "reference": list(self.reference_partings.items()),
            }
        )
        schemes = {}
        for scheme in self.trained:
            found: dict[int, float] = dict.fromkeys(self.replica_steps[scheme.key], 0.0)
            for row in rows:
                for step, difference in row["partings"][scheme.key]:
                    found[step] = max(found.get(step, 0.0), difference)
            schemes[scheme.key] = {
                "name": scheme.name,
                "losses": self.losses[scheme.key],
                "final_loss": self.losses[scheme.key][-1],
                "theta_digest": checks.theta_digest(scheme),
                **_parting_summary(found, self.steps, self.partner is not None),
                "replicas_differ_steps": len(self.replica_steps[scheme.key]),
            }
        replay = None
        if self.partner is not None and self.settings.reference:
            replay = _parting_summary(dict(rows[0]["reference"]), self.steps, True)
        return {"steps": self.steps, "schemes": schemes, "reference": replay}


def _parting_summary(found: dict[int, float], steps: int, compared: bool) -> dict[str, Any]:
    if not compared:
        return {"identical_steps": None, "max_abs_difference": None, "first_difference_step": None}
    largest = max(found.values(), default=0.0)
    return {
        "identical_steps": steps - len(found),
        "max_abs_difference": largest if math.isfinite(largest) else "not finite",
        "first_difference_step": min(found, default=None),
    }


def _learning_verdicts(learning: dict[str, Any], settings: Settings) -> list[Verdict]:
    steps, schemes = learning["steps"], learning["schemes"]
    parted = [
        f"{row['name']} parts from data parallel in step {row['first_difference_step']}"
        for row in schemes.values()
        if row["identical_steps"] != steps
    ]
    each = "the step" if steps == 1 else f"each of {steps} steps"
    same = f"{len(schemes)} schemes hold the same bits after {each}, on every rank"
    if len(schemes) == 1:
        same = f"all ranks hold the same bits after {each}"
    verdicts = [Verdict("learning", not parted, "; ".join(parted) or same)]
    if settings.reference:
        replay = learning["reference"]
        holds = replay["identical_steps"] == steps
        every = "the step" if steps == 1 else f"all {steps} steps"
        says = f"the replay in one process, in the ring's order, gives the same bits in {every}"
        if not holds:
            says = (
                f"the replay in one process parts from data parallel in step "
                f"{replay['first_difference_step']}, by up to {replay['max_abs_difference']}"
            )
        verdicts.append(Verdict("reference", holds, says))
    return verdicts


def _memory(scheme: Scheme, fault: str) -> dict[str, Any]:
    claim = SCHEMES[type(scheme)]
    rows = scheme.comm.allgather_object({**checks.memory_evidence(scheme, claim), "fault": fault})
    held = sum(sum(row["held_bytes"].values()) for row in rows)
    items = checks.itemsizes(scheme)
    return {
        "name": scheme.name,
        "formula": formulas.bytes_per_param_text(claim, items),
        "formula_bytes_per_param": float(formulas.bytes_per_param(claim, items, scheme.comm.size)),
        "mean_bytes_per_param": held / (scheme.comm.size * scheme.model.n_params),
        "fault": _first_fault(scheme.name, rows),
        "ranks": rows,
    }


def _traffic(scheme: Scheme, fault: str) -> dict[str, Any]:
    claim = SCHEMES[type(scheme)]
    rows = scheme.comm.allgather_object({**checks.traffic_evidence(scheme, claim), "fault": fault})
    sent = sum(sum(row["sent_bytes"].values()) for row in rows)
    expected = formulas.sent_bytes_all_ranks(
        claim, scheme.model.units, checks.itemsizes(scheme), scheme.comm.size
    )
    summed = f"{scheme.name}: all ranks together sent {sent} B, formula {expected} B"
    received = sum(row["received_bytes"] for row in rows)
    lost = f"{scheme.name}: {sent} B sent, {received} B received"
    return {
        "name": scheme.name,
        "formula": f"{formulas.traffic_units(claim, 2) * 2}(N-1)/N",
        "formula_units": float(formulas.traffic_units(claim, scheme.comm.size)),
        "mean_units": {
            name: sum(row["sent_units"][name] for row in rows) / scheme.comm.size
            for name in ("reduce-scatter", "all-gather")
        },
        "all_ranks_sent_bytes": sent,
        "all_ranks_formula_bytes": expected,
        "fault": _first_fault(scheme.name, rows)
        or (summed if sent != expected else "")
        or (lost if sent != received else ""),
        "ranks": rows,
    }


def _audit(comm: Communicator, settings: Settings, S: type[Scheme], memory: dict[str, Any]) -> dict[str, Any]:
    """Train one scheme alone for two steps beside Python's allocator, and audit the second. Collective."""
    batches = list(itertools.islice(settings.data.global_batches(comm.size), 2))
    mine = [batch[comm.rank] for batch in batches]
    audit = Audit()
    scheme = settings.build(S, comm)
    scheme.step(mine[0])
    audit.watch(
        scheme, ("full_params", "grad_buffer", "grad_ready", "backward_done", "update"), scheme.ledger
    )
    audit.begin(scheme.ledger)
    scheme.step(mine[-1])
    finding = audit.finding(scheme.ledger)
    peak_limit = (
        AUDIT_PEAK_BYTES
        + AUDIT_PEAK_BYTES_A_UNIT * len(scheme.units)
        + memory["transient_peak_by_kind_bytes"].get("activations", 0)
    )
    fault = ""
    if finding.resident_outside_bytes > AUDIT_RESIDENT_BYTES:
        fault = f"{finding.resident_outside_bytes} B live outside the ledger, most at {finding.largest}"
    elif finding.peak_outside_bytes > peak_limit:
        fault = f"{finding.peak_outside_bytes} B more than the ledger's at the peak of a step"
    rows = comm.allgather_object({**finding._asdict(), "fault": fault})
    return {
        "name": S.name,
        "resident_limit_bytes": AUDIT_RESIDENT_BYTES,
        "peak_limit_bytes": peak_limit,
        "fault": _first_fault(S.name, rows),
        "ranks": rows,
    }


def _first_fault(name: str, rows: list[dict[str, Any]]) -> str:
    return next((f"{name}, rank {r}: {row['fault']}" for r, row in enumerate(rows) if row["fault"]), "")


def _fault_verdict(check: str, what: str, schemes: dict[str, dict[str, Any]]) -> Verdict:
    faults = [row["fault"] for row in schemes.values() if row["fault"]]
    equal = f"{what} equal the formula on every rank, to the byte"
    if check == "audit":
        limits = [[row[f"{part}_limit_bytes"] for row in schemes.values()] for part in ("resident", "peak")]
        equal = (
            f"Python's allocator sees nothing outside the ledger beyond {max(limits[0])} B at rest and "
            f"{max(limits[1])} B at the peak of a step"
        )
    return Verdict(check, not faults, "; ".join(faults) or equal)
