"""Step schemes in lockstep on the same batches, and collect the evidence of both checks.

Not for: arguments (train.py), printing (report.py) or judging a single rank (checks.py).
"""

import itertools
import math
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from . import checks, formulas, parting
from .certificate import Chain
from .checks import Verdict
from .comm import Communicator, OutOfStep, SharedMistake
from .data import Data, MicroBatches
from .engine import NotFinite
from .injection import Fault
from .memory import Audit
from .model import Model
from .optim import Optimizer
from .precision import Precision
from .reducers import Reducer, Ring
from .reference import OPTIMIZERS, ORDERS, Reference
from .schemes import SCHEMES, Scheme
from .training import Training

# What an audit lets pass. At rest: a handful of scalars. At the peak of a step: the interpreter's own objects
# made in it, which grow with the units, and once more what activations take (a gradient of activations while
# it is being made).
AUDIT_RESIDENT_BYTES = 1024
AUDIT_PEAK_BYTES = 48 * 1024
AUDIT_PEAK_BYTES_A_UNIT = 2048

Found = TypeVar("Found")


@dataclass(frozen=True)
class Settings:
    """What a run trains, and how much of it is checked.

    steps : at most so many; None for as many as the data has.
    check : compare schemes with each other. reference : replay the run on rank 0 alone, too.
    certificate_every : take digests at the start, every so many steps, and at the end; None for never.
    fault : a known mistake to make. faulty : the keys of the schemes that make it.
    """

    model: Model
    data: Data
    precision: Precision
    optimizer: Optimizer
    training: Training = field(default_factory=Training)
    init_seed: int = 0
    steps: int | None = 10
    reducer: type[Reducer] = Ring
    check: bool = True
    reference: bool = True
    audit_memory: bool = False
    certificate_every: int | None = None
    fault: Fault | None = None
    faulty: tuple[str, ...] = ()

    def build(self, S: type[Scheme], comm: Communicator, reducer: type[Reducer] | None = None) -> Scheme:
        """Return a scheme with these settings, or with another reducer. Collective."""
        fault = self.fault if self.fault is not None and S.key in self.faulty else None
        scheme = S(
            fault.model(self.model, comm.rank) if fault and fault.model else self.model,
            comm,
            precision=self.precision,
            optimizer=self.optimizer,
            training=self.training,
            init_seed=self.init_seed,
            reducer=reducer or self.reducer,
        )
        if fault and fault.scheme:
            fault.scheme(scheme)
        return scheme

    def global_batches(self, comm: Communicator) -> Iterator[Sequence[MicroBatches]]:
        """Yield the global batches to train on, the same on all ranks unless a fault makes them differ."""
        data = self.data
        if self.fault is not None and self.fault.data is not None:
            data = self.fault.data(data, comm.rank)
        return itertools.islice(data.global_batches(comm.size), self.steps)


def run(comm: Communicator, settings: Settings, schemes: Sequence[type[Scheme]]) -> dict[str, Any]:
    """Train each of `schemes` and return the evidence, the same on every rank. Collective.

    Returns
    -------
    dict that JSON can hold, with the keys "learning", "memory", "traffic", "process" and "verdicts", and
    "audit" and "certificate" where they were asked for; numbers have their unit in the key's name. Lists
    called "ranks" have one entry for each rank.

    Raises
    ------
    SharedMistake : the ranks do not share the settings, or the optimizer is one that the reference lacks.
    NotFinite : a loss, a gradient or a weight is not finite. OutOfStep : ranks hand units over in different
        orders.
    """
    replayed = settings.check and settings.reference and settings.reducer.name in ORDERS
    if replayed and not isinstance(settings.optimizer, OPTIMIZERS):
        raise SharedMistake(
            f"reference: expected Adam or SGD, which it has written out again, got "
            f"{type(settings.optimizer).__name__}; it can be left out"
        )
    hosts = comm.hosts()
    process = _Process()
    trained = [settings.build(S, comm) for S in schemes]
    lockstep = _Lockstep(comm, settings, trained, hosts)
    # Weights that overflow are judged below, once and for all ranks, not warned of by each.
    with np.errstate(over="ignore", invalid="ignore"):
        for batches in settings.global_batches(comm):
            lockstep.step(batches)
    lockstep.refuse_weights_not_finite()
    learning = lockstep.learning()
    memory = {s.key: _memory(s, lockstep.memory_faults.get(s.key, "")) for s in trained}
    traffic = {
        s.key: _traffic(s, lockstep.sent[s.key], lockstep.traffic_faults.get(s.key, "")) for s in trained
    }
    verdicts = _learning_verdicts(learning, settings, comm.size) if settings.check else []
    verdicts.append(_fault_verdict("memory", "bytes held", memory))
    verdicts.append(_traffic_verdict(settings, traffic))
    result: dict[str, Any] = {"learning": learning, "memory": memory, "traffic": traffic}
    if lockstep.chains:
        lockstep.certify(last=True)
        result["certificate"] = dict(lockstep.chains)
    result["process"] = comm.allgather_object(process.finding(lockstep.schemes))
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

    Raises
    ------
    SharedMistake, NotFinite, OutOfStep : as `run`, on all ranks of `comm`.
    """

    def work(part: Communicator) -> dict[str, Any]:
        if settings.fault is None:
            return run(part, settings, schemes)
        return _on_own_messages(part, lambda own: run(own, settings, schemes))

    result = on_first(comm, size, work) or {"verdicts": []}
    return {**result, "verdicts": comm.allgather_object(result["verdicts"])[0]}


def _on_own_messages(comm: Communicator, work: Callable[[Communicator], Found]) -> Found:
    """Do `work` on the same ranks with messages of its own, so that those of ranks that fell out of step stay
    there. Collective.

    Raises
    ------
    OutOfStep : ranks fell out of step; all raise the same, the words of one that saw who.
    """
    part = comm.split(0, patient=True)
    if part is None:
        raise ValueError("a rank has no part")
    try:
        result = work(part)
    except OutOfStep as error:
        words = comm.allgather_object(str(error))
        part.give_up()
        raise OutOfStep(next((text for text in words if "different orders" in text), words[0])) from None
    except (SharedMistake, NotFinite):
        part.free()
        raise
    part.free()
    return result


def on_first(comm: Communicator, size: int, work: Callable[[Communicator], Found]) -> Found | None:
    """Do `work` on the first `size` ranks of `comm` while the others sleep; return None on those. Collective.

    Raises
    ------
    SharedMistake, NotFinite, OutOfStep : what `work` raised, on all ranks of `comm`.
    """
    if size == comm.size:
        return work(comm)
    part = comm.split(0 if comm.rank < size else None)
    result = None
    failure, words = "", ""
    losses: dict[str, list[float]] = {}
    with comm.root_works():
        if part is not None:
            try:
                result = work(part)
            except (SharedMistake, NotFinite, OutOfStep) as error:
                # All that took part raise it; those that sleep have to be told.
                failure, words = type(error).__name__, f"N = {size}: {error}"
                losses = getattr(error, "losses", {})
            part.free()
    failure, words, losses = comm.allgather_object([failure, words, losses])[0]
    if failure == "NotFinite":
        reached = NotFinite(words)
        reached.losses = losses
        raise reached
    if failure:
        raise {"OutOfStep": OutOfStep}.get(failure, SharedMistake)(words)
    return result


class _Process:
    """The memory of this process as the OS sees it, beside what the ledgers say."""

    def __init__(self) -> None:
        self.base_bytes = _resident_bytes()

    def finding(self, schemes: Sequence[Scheme]) -> dict[str, Any]:
        """Return the OS's peak since the process began, and the ledgers' own over all schemes. Local.

        Schemes take their steps in turn, so only one at a time holds transients.
        """
        at_rest = sum(s.ledger.total_bytes for s in schemes)
        above = max(s.ledger.total_peak_bytes - s.ledger.total_bytes for s in schemes)
        predicted = self.base_bytes + at_rest + above
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "base_bytes": self.base_bytes,
            "ledger_peak_bytes": at_rest + above,
            "os_peak_bytes": peak,
            "os_peak_over_base_plus_ledger": peak / predicted,
        }


def _resident_bytes() -> int:
    """Return the resident bytes of this process now; of its peak where there is no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Lockstep:
    """Several schemes, stepped in turn on the same batches, so that the first step that parts is known.

    Schemes that reduce gradients at the same moments are a family: they add the same numbers in the same
    order, so they must hold the same bits. Families may part, by rounding.
    """

    def __init__(
        self, comm: Communicator, settings: Settings, trained: list[Scheme], hosts: Sequence[str]
    ) -> None:
        self.comm, self.settings, self.trained, self.hosts = comm, settings, trained, hosts
        self.losses: dict[str, list[float]] = {s.key: [] for s in trained}
        self.norms: dict[str, list[float | None]] = {s.key: [] for s in trained}
        self.skipped: dict[str, list[tuple[int, str]]] = {s.key: [] for s in trained}
        self.partings: dict[str, dict[int, float]] = {s.key: {} for s in trained}
        # Beside data parallel, whoever the partner is: the weights' distance, and whether all was the same.
        self.from_first: dict[str, float] = {s.key: 0.0 for s in trained}
        self.as_first: dict[str, bool] = {s.key: True for s in trained}
        self.from_ring = 0.0
        self.replica_steps: dict[str, list[int]] = {s.key: [] for s in trained}
        self.memory_faults: dict[str, str] = {}
        self.traffic_faults: dict[str, str] = {}
        # What each sent in the last step that it did not skip, or in the last if it skipped all.
        self.sent: dict[str, dict[str, Any]] = {}
        self.steps = 0
        # The first parting of each scheme that has one, on rank 0; None if the reference cannot tell.
        self.found: dict[str, parting.Parting | None] = {}
        self.chains: dict[str, Chain] = {}
        self._last: MicroBatches = ()
        if settings.certificate_every is not None:
            self.chains = {s.key: Chain(s.model.units) for s in trained}
            self.certify()
        # What each is compared with: the first of its family, one without a fault if there is one.
        self.partners: dict[str, Scheme] = {}
        self.rings: dict[str, Scheme] = {}
        self.beside_ring = settings.check and settings.reducer is not Ring
        self.references: dict[str, Reference | None] = {}
        self.reference_partings: dict[str, dict[int, float]] = {}
        if not settings.check:
            return
        for scheme in trained:
            mine = family(type(scheme), settings.training)
            alike = [s for s in trained if family(type(s), settings.training) == mine]
            self.partners[scheme.key] = next((s for s in alike if s.key not in settings.faulty), alike[0])
        if self.beside_ring:
            # The same training in the ring's order, to say how much another order changes.
            for scheme in dict.fromkeys(self.partners.values()):
                self.rings[scheme.key] = settings.build(type(scheme), comm, Ring)
        if settings.reference and settings.reducer.name in ORDERS:
            for scheme in dict.fromkeys(self.partners.values()):
                self.reference_partings[scheme.key] = {}
                self.references[scheme.key] = self._reference(scheme) if comm.rank == 0 else None

    @property
    def schemes(self) -> list[Scheme]:
        """All that is trained, the rings beside another reducer too."""
        return [*self.trained, *self.rings.values()]

    def _reference(self, scheme: Scheme) -> Reference:
        s = self.settings
        return Reference(
            s.model,
            self.comm.size,
            s.precision,
            s.optimizer,
            s.init_seed,
            s.training,
            scheme.reduce_every,
            s.reducer.name,
        )

    def step(self, batches: Sequence[MicroBatches]) -> None:
        self.steps += 1
        mine = batches[self.comm.rank]
        for scheme in self.trained:
            try:
                self.losses[scheme.key].append(scheme.step(*mine))
            except NotFinite as error:
                error.losses = {key: losses[: self.steps - 1] for key, losses in self.losses.items()}
                error.chains = dict(self.chains)
                raise
            self.norms[scheme.key].append(scheme.grad_norm)
            if scheme.skipped:
                self.skipped[scheme.key].append((self.steps, scheme.skipped))
            claim = SCHEMES[type(scheme)]
            sent = checks.traffic_evidence(scheme, claim, self.hosts)
            if sent["updated"] or not self.sent.get(scheme.key, sent)["updated"]:
                self.sent[scheme.key] = sent
            for faults, fault in (
                (self.memory_faults, checks.memory_fault(checks.memory_evidence(scheme, claim))),
                (self.traffic_faults, checks.traffic_fault(sent)),
            ):
                if fault and scheme.key not in faults:
                    faults[scheme.key] = f"step {self.steps}: {fault}"
        for scheme in self.trained if self.partners else ():
            partner = self.partners[scheme.key]
            found = checks.compare(scheme, partner)
            if not found.identical or not _same(self.losses[scheme.key][-1], self.losses[partner.key][-1]):
                self.partings[scheme.key][self.steps] = max(found.owned, found.replica)
            if not checks.replicas_agree(scheme):
                self.replica_steps[scheme.key].append(self.steps)
            first = found if partner is self.trained[0] else checks.compare(scheme, self.trained[0])
            self.as_first[scheme.key] &= first.identical
            if partner is not self.trained[0] or not found.identical:
                apart = checks.difference_of_weights(scheme, self.trained[0])
                self.from_first[scheme.key] = max(self.from_first[scheme.key], apart)
        for key, ring in list(self.rings.items()):
            try:
                ring.step(*mine)
            except NotFinite:
                # It measures a distance: what is asked for has not failed. All ranks are here alike.
                del self.rings[key]
                self.from_ring = math.inf
                continue
            for scheme in self.trained:
                if self.partners[scheme.key].key == key:
                    apart = checks.difference_of_weights(scheme, ring)
                    self.from_ring = max(self.from_ring, apart)
        for key in self.references:
            self._replay(key, batches)
        if self.partners:
            self._look_closer(batches)
        self._last = mine
        if self.settings.certificate_every and self.steps % self.settings.certificate_every == 0:
            self.certify()

    def refuse_weights_not_finite(self) -> None:
        """Raise NotFinite if a scheme ended with weights or moments that no loss has shown. Collective."""
        for scheme in self.trained:
            finite = self.comm.allgather_scalar(checks.owns_finite(scheme), np.uint8)
            if not finite.all():
                failure = NotFinite(
                    f"weights: expected finite numbers, got NaN or infinity on rank {int(np.argmin(finite))} "
                    f"after step {self.steps} of {scheme.name}"
                )
                failure.losses, failure.chains = self.losses, dict(self.chains)
                raise failure

    def _look_closer(self, batches: Sequence[MicroBatches]) -> None:
        """Find out where and why schemes that have just parted did. Collective."""
        trouble = [
            self.steps in self.partings[s.key]
            or self.steps in self.replica_steps[s.key]
            or self.steps in self.reference_partings.get(self.partners[s.key].key, {})
            for s in self.trained
        ]
        anywhere = self.comm.allgather_array(np.array(trouble, np.uint8)).max(axis=0)
        for scheme, parted in zip(self.trained, anywhere.tolist(), strict=True):
            partner = self.partners[scheme.key].key
            if not parted or scheme.key in self.found or partner not in self.references:
                continue
            used = self.comm.allgather_scalar(checks.batch_digest(batches[self.comm.rank]), np.uint64)
            # Rank 0 draws every rank's batch.
            due = [checks.batch_digest(batches[rank]) for rank in range(self.comm.size)]
            others = [rank for rank in range(self.comm.size) if int(used[rank]) != due[rank]]
            seen = parting.observe(scheme, others)
            self.found[scheme.key] = None
            with self.comm.root_works():
                reference = self.references[partner]
                if seen is not None and reference is not None:
                    self.found[scheme.key] = parting.find(self.steps, seen, reference)

    def certify(self, last: bool = False) -> None:
        """Append a link of this step to each chain, unless it is the last and there. Collective."""
        if last and all(chain.links[-1].step == self.steps for chain in self.chains.values()):
            return
        begun = self.steps > 0
        rows = checks.data_digest(self.comm, self._last) if begun else None
        for scheme in self.trained:
            chain = self.chains[scheme.key]
            grads, params = checks.unit_digests(scheme)
            chain.append(
                self.steps,
                params=params,
                grads=grads if begun else None,
                loss=self.losses[scheme.key][-1] if begun else None,
                data=rows,
            )

    def _replay(self, key: str, batches: Sequence[MicroBatches]) -> None:
        scheme, reference = self.partners[key], self.references[key]
        theta = scheme.full_theta()
        with self.comm.root_works():
            if reference is not None and theta is not None:
                loss = reference.step(batches)
                identical, difference = checks.matches_reference(scheme, theta, reference.theta)
                same = _same(loss, self.losses[key][-1]) and reference.norm == scheme.grad_norm
                if not (identical and same and reference.skipped == bool(scheme.skipped)):
                    self.reference_partings[key][self.steps] = difference

    def learning(self) -> dict[str, Any]:
        """Return the evidence of check one, gathered from all ranks. Collective."""
        rows = self.comm.allgather_object(
            {
                "partings": {key: list(found.items()) for key, found in self.partings.items()},
                "from_first": self.from_first,
                "as_first": self.as_first,
                "from_ring": self.from_ring,
                "reference": {key: list(found.items()) for key, found in self.reference_partings.items()},
                "found": {key: found._asdict() for key, found in self.found.items() if found is not None},
            }
        )
        schemes = {}
        for scheme in self.trained:
            key = scheme.key
            found: dict[int, float] = dict.fromkeys(self.replica_steps[key], 0.0)
            for row in rows:
                for step, difference in row["partings"][key]:
                    found[step] = max(found.get(step, 0.0), difference)
            # A scheme that nobody shares its order with can only be seen to part from itself.
            alone = scheme is not self.trained[0] and list(self.partners.values()).count(scheme) == 1
            summary = _parting_summary(found, self.steps, bool(self.partners) and (not alone or bool(found)))
            if self.partners:
                # Against data parallel, whatever the partner is.
                largest = max([*found.values(), *(row["from_first"][key] for row in rows)])
                summary["max_abs_difference"] = _finite_or_words(largest)
            schemes[key] = {
                "name": scheme.name,
                "compared_with": self.partners[key].key if self.partners else None,
                "same_as_first": all(row["as_first"][key] for row in rows) if self.partners else None,
                "reduce_every": scheme.reduce_every,
                "losses": [loss if math.isfinite(loss) else None for loss in self.losses[key]],
                "final_loss": self.losses[key][-1] if math.isfinite(self.losses[key][-1]) else None,
                "grad_norms": self.norms[key],
                "skipped_steps": self.skipped[key],
                "final_loss_scale": scheme.scale.value,
                "theta_digest": checks.theta_digest(scheme),
                **summary,
                "replicas_differ_steps": len(self.replica_steps[key]),
                "parting": rows[0]["found"].get(key),
            }
        replays = {
            key: _parting_summary(dict(rows[0]["reference"][key]), self.steps, True)
            for key in self.references
        }
        return {
            "steps": self.steps,
            "reducer": self.settings.reducer.name,
            "order": self.settings.reducer.order,
            "grads_dtype": self.settings.precision.grads,
            "schemes": schemes,
            "max_abs_difference_from_ring": (
                _finite_or_words(max(row["from_ring"] for row in rows)) if self.beside_ring else None
            ),
            "reference": replays or None,
        }


def family(S: type[Scheme], training: Training) -> str:
    """Return what schemes have in common that add the same numbers in the same order."""
    return "step" if training.accumulate == 1 else training.reduce_every or S.reduce_every


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _finite_or_words(value: float) -> float | str:
    return value if math.isfinite(value) else "not finite"


def _parting_summary(found: dict[int, float], steps: int, compared: bool) -> dict[str, Any]:
    if not compared:
        return {"identical_steps": None, "max_abs_difference": None, "first_difference_step": None}
    return {
        "identical_steps": steps - len(found),
        "max_abs_difference": _finite_or_words(max(found.values(), default=0.0)),
        "first_difference_step": min(found, default=None),
    }


def _learning_verdicts(learning: dict[str, Any], settings: Settings, size: int) -> list[Verdict]:
    steps, schemes = learning["steps"], learning["schemes"]
    families: dict[str, list[dict[str, Any]]] = {}
    for row in schemes.values():
        families.setdefault(row["compared_with"], []).append(row)
    parted = [
        _parting_words(key, schemes)
        for key, row in schemes.items()
        if row["identical_steps"] not in (steps, None)
    ]
    each = "the step" if steps == 1 else f"each of {steps} steps"
    same = f"{len(schemes)} schemes hold the same bits after {each}, on every rank"
    if len(schemes) == 1 and size == 1:
        return [
            Verdict("learning", None, "not compared: one scheme on one rank has nobody to differ from"),
            *([_reference_verdict(learning, settings)] if settings.reference else []),
        ]
    if len(schemes) == 1:
        same = f"all ranks hold the same bits after {each}"
    elif not all(row["same_as_first"] for row in schemes.values()):
        same = _families_words(learning, each, list(families.values()))
    fewest = min(len(row["skipped_steps"]) for row in schemes.values())
    if fewest == steps:
        same += f". All {steps} were skipped: nothing was trained" if steps > 1 else ". It was skipped"
    if settings.reducer.order:
        verdicts = [Verdict("learning", not parted, "; ".join(parted) or same)]
    else:
        says = (
            f"{'; '.join(parted) or same}. Not judged: the library may sum each collective in another order"
        )
        verdicts = [Verdict("learning", None, says)]
    if settings.reference:
        verdicts.append(_reference_verdict(learning, settings))
    return verdicts


def _parting_words(key: str, schemes: dict[str, dict[str, Any]]) -> str:
    row = schemes[key]
    partner, step = row["compared_with"], row["first_difference_step"]
    if partner == key:
        return f"{row['name']}: ranks hold other copies of the parameters in step {step}"
    return f"{row['name']} parts from {schemes[partner]['name']} in step {step}"


def _families_words(learning: dict[str, Any], each: str, families: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return how far families of schemes are apart, and why: by rounding only where replays have shown it."""
    rows = [row for family in families for row in family]
    names = [" and ".join(row["name"] for row in family) for family in families]
    apart = max(
        row["max_abs_difference"] or 0.0 for row in rows if not isinstance(row["max_abs_difference"], str)
    )
    replays = learning["reference"] or {}
    replayed = replays and all(replay["identical_steps"] == learning["steps"] for replay in replays.values())
    distance = f"Weights are apart by up to {apart:.3g}" if apart else "Gradients are apart, no weight is yet"
    if all(len(row["skipped_steps"]) == learning["steps"] for row in rows):
        why = ", since every step was skipped. One adds up"
    elif len({tuple(step for step, _ in row["skipped_steps"]) for row in rows}) > 1:
        why = ", since one skipped steps that the other did not. One adds up"
    elif replayed:
        why = ", by rounding: one adds up"
    else:
        why = "; right schemes are, by rounding: one adds up"
    return (
        f"the same bits after {each}, on every rank, among {'; among '.join(names)}. {distance}{why} "
        "micro-batches, then ranks; the other ranks, then micro-batches (--reduce-every makes them one)"
    )


def _reference_verdict(learning: dict[str, Any], settings: Settings) -> Verdict:
    steps, replays = learning["steps"], learning["reference"]
    if replays is None:
        whose = "the library's order" if settings.reducer.held_to is None else "this reducer's order"
        return Verdict("reference", None, f"not replayed: {whose} of summation is not known to it")
    parted = [
        f"the replay in one process parts from {learning['schemes'][key]['name']} in step "
        f"{replay['first_difference_step']}, {_by_how_much(replay['max_abs_difference'])}"
        for key, replay in replays.items()
        if replay["identical_steps"] != steps
    ]
    every = "the step" if steps == 1 else f"all {steps} steps"
    whose = " and of ".join(learning["schemes"][key]["name"] for key in replays)
    same = (
        f"the replay in one process, in the order of {settings.reducer.name}, gives the bits of {whose} "
        f"in {every}"
    )
    return Verdict("reference", not parted, "; ".join(parted) or same)


def _by_how_much(apart: float | str) -> str:
    if isinstance(apart, str):
        return f"by what is {apart}"
    return f"by up to {apart:.3g}" if apart else "in what is no weight: loss, norm or copy"


def _memory(scheme: Scheme, fault: str) -> dict[str, Any]:
    claim = SCHEMES[type(scheme)]
    rows = scheme.comm.allgather_object({**checks.memory_evidence(scheme, claim), "fault": fault})
    held = sum(sum(row["held_bytes"].values()) for row in rows)
    work = checks.workload(scheme)
    return {
        "name": scheme.name,
        "formula": formulas.bytes_per_param_text(claim, work),
        "formula_bytes_per_param": float(formulas.bytes_per_param(claim, work)),
        "mean_bytes_per_param": held / (scheme.comm.size * scheme.model.n_params),
        "fault": _first_fault(scheme.name, rows),
        "ranks": rows,
    }


def _traffic(scheme: Scheme, evidence: dict[str, Any], fault: str) -> dict[str, Any]:
    """Return what all ranks sent in the step that `evidence` is of. Collective."""
    updated = evidence["updated"]
    claim, work = SCHEMES[type(scheme)], checks.promised(scheme)._replace(updated=updated)
    rows = scheme.comm.allgather_object({**evidence, "fault": fault})
    sent = sum(sum(row["sent_bytes"].values()) for row in rows)
    expected = formulas.sent_bytes_all_ranks(claim, work)
    counted = evidence["counted"]
    summed = f"{scheme.name}: all ranks together sent {sent} B, formula {expected} B"
    received = sum(row["received_bytes"] for row in rows)
    lost = f"{scheme.name}: {sent} B sent, {received} B received"
    return {
        "name": scheme.name,
        "counted": counted,
        "updated": updated,
        "skipped_all_gather": not updated
        and formulas.traffic_units(claim, work._replace(updated=True)) != formulas.traffic_units(claim, work),
        "formula": formulas.traffic_units_text(claim, work),
        "formula_units": float(formulas.traffic_units(claim, work)),
        "mean_units": {
            name: sum(row["sent_units"][name] for row in rows) / scheme.comm.size
            for name in ("reduce-scatter", "all-gather")
        },
        "all_ranks_sent_bytes": sent,
        "all_ranks_formula_bytes": expected,
        "fault": _first_fault(scheme.name, rows)
        or (summed if counted and sent != expected else "")
        or (lost if sent != received else ""),
        "ranks": rows,
    }


def _audit(comm: Communicator, settings: Settings, S: type[Scheme], memory: dict[str, Any]) -> dict[str, Any]:
    """Train one scheme alone for two steps beside Python's allocator, and audit the second. Collective."""
    batches = list(itertools.islice(settings.global_batches(comm), 2))
    mine = [batch[comm.rank] for batch in batches]
    audit = Audit()
    scheme = settings.build(S, comm)
    scheme.step(*mine[0])
    audit.watch(
        scheme, ("full_params", "grad_buffer", "grad_ready", "backward_done", "update"), scheme.ledger
    )
    audit.begin(scheme.ledger)
    scheme.step(*mine[-1])
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


def _traffic_verdict(settings: Settings, schemes: dict[str, dict[str, Any]]) -> Verdict:
    verdict = _fault_verdict("traffic", "bytes sent", schemes)
    if settings.reducer.held_to is not None or not verdict.holds:
        return verdict
    calls = max(rank["library_calls"] for row in schemes.values() for rank in row["ranks"])
    says = (
        f"not counted: up to {calls} calls of the MPI library a rank and step; it keeps its bytes to itself"
    )
    return Verdict("traffic", None, says)
