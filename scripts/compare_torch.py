"""Train the same MLP with us on N ranks and with PyTorch in one process, and say why they differ.

Not for: speed (bench_step.py). Without torch it says so in one line and exits with 2.

    mpiexec -n 3 python scripts/compare_torch.py
    python scripts/compare_torch.py --dims 64,128,10 --steps 20 --json compared.json
    mpiexec -n 2 python scripts/compare_torch.py --scheme zero1 --certificate ours.json theirs.json

Same initial weights, copied unit by unit; same rows, PyTorch all ranks' in one batch; float32, mean squared
error, Adam with the same numbers, one thread. First both train, each on its own weights, and each step says
how far they are apart. Then, on our weights of each step, one thing of PyTorch's takes the place of ours: its
products, its order of summation, its gradient, its Adam, each part of that. What changes bits is a cause; how
many, and by how much, is its size; and where a row says 0 is left, there is no other cause.

The class is parting.py's, which finds mistakes by reproducing their bits or fitting their numbers. What it
calls unknown is "rounding" if a float64 run from the same weights is as near as rounding can explain.
Mistakes are planted at the end, to show what they look like.

Our side is replayed on rank 0 (reference.py), which has the parts that ranks do not keep; the replay must
have the ranks' bits. Exit code 0 if all is explained, 1 if something is not or a number stops being finite,
2 for a mistake in what was asked.

--certificate writes digests of both runs with `zero_mpi.certificate`, PyTorch's from numpy views of its CPU
tensors, and compares them: they show where two runs part, not why.
"""

import argparse
import copy
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

from zero_mpi.__main__ import take_one_blas_thread

take_one_blas_thread()

import numpy as np

from zero_mpi import certificate, checks, compare, parting, report
from zero_mpi.arguments import Parser, positive_float, positive_int, whole_from_0, widths
from zero_mpi.comm import Communicator, SharedMistake
from zero_mpi.data import Batch, MicroBatches, SeedStream
from zero_mpi.engine import NotFinite
from zero_mpi.model import MLP
from zero_mpi.optim import Adam
from zero_mpi.parting import Observed, ulp_distances
from zero_mpi.precision import Precision
from zero_mpi.reference import Reference
from zero_mpi.schemes import SCHEMES
from zero_mpi.transport import MPIMissing, launched_rank

SCHEMA = "zero_mpi.compare_torch/1"
EPS = float(np.finfo(np.float32).eps)

# Two right runs may part so.
NO_MISTAKE = ("-", "rounding", "summation order")

Units = Sequence[np.ndarray]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = Parser(
        prog="compare_torch.py",
        description=(__doc__ or "").splitlines()[0],
    )
    keys = [S.key for S in SCHEMES]
    p.add_argument("--dims", type=widths, default=(64, 128, 128, 64), help="of the MLP [64,128,128,64]")
    p.add_argument("--steps", type=positive_int, default=10, help="steps to train [10]")
    p.add_argument("--batch", type=positive_int, default=8, help="rows of each rank's batch [8]")
    p.add_argument("--scheme", choices=keys, default="zero3", help="ours [zero3]; all have the same bits")
    p.add_argument("--lr", type=positive_float, default=0.01, help="learning rate [0.01]")
    p.add_argument("--seed", type=whole_from_0, default=7, help="of the batches [7]")
    p.add_argument("--init-seed", type=whole_from_0, default=0, help="of the initial weights [0]")
    p.add_argument("--json", metavar="FILE", help="write all numbers to FILE")
    p.add_argument("--certificate", nargs=2, metavar=("OURS", "THEIRS"), help="write digests of both runs")
    return p


class Apart(NamedTuple):
    """How far two vectors are apart.

    Fields
    ------
    share : of elements that differ in a bit. median_ulp : of those, the steps from float to float between the
        two; 0 if none. largest : difference. at : its unit and place.
    """

    share: float
    median_ulp: float
    largest: float
    at: tuple[int, int]


def apart(observed: Units, expected: Units) -> Apart:
    """Return how far the units of two models are apart."""
    ulps = np.concatenate([ulp_distances(a, b) for a, b in zip(observed, expected, strict=True)])
    by_unit = [np.abs(a.astype(np.float64) - b) for a, b in zip(observed, expected, strict=True)]
    u = int(np.argmax([difference.max() for difference in by_unit]))
    differing = ulps[ulps > 0]
    return Apart(
        differing.size / ulps.size,
        float(np.median(differing)) if differing.size else 0.0,
        float(by_unit[u].max()),
        (u, int(np.argmax(by_unit[u]))),
    )


@dataclass
class Source:
    """One thing of PyTorch's in place of ours: what that changed in each step, and its classes.

    Attributes
    ----------
    label : as the table says it. classes : those of all steps, in the order they were met; "-" for no change.
    """

    label: str
    found: list[Apart] = field(default_factory=list)
    classes: dict[str, str] = field(default_factory=dict)

    def note(self, found: Apart, kind: str, why: str = "") -> None:
        """Take note of one step."""
        self.found.append(found)
        self.classes.setdefault(kind if found.share else "-", why)

    @property
    def changes(self) -> bool:
        """Whether it changed a bit in any step."""
        return any(found.share for found in self.found)

    @property
    def largest(self) -> Apart:
        """The step in which it changed most."""
        return max(self.found, key=lambda found: found.largest)

    def kinds(self) -> list[str]:
        """Return the classes, without "-" if there is another."""
        return [kind for kind in self.classes if kind != "-"] or ["-"]

    def row(self) -> list[str]:
        """Return its row of the table: means over steps, and the largest of all."""
        share = float(np.mean([found.share for found in self.found]))
        ulps = [found.median_ulp for found in self.found if found.share]
        return [self.label, ", ".join(self.kinds()), *_cells(share, ulps, self.largest.largest)]

    def document(self) -> dict[str, Any]:
        """Return what the JSON file has of it."""
        return {
            "label": self.label.strip(),
            "classes": self.kinds(),
            "evidence": [why for kind, why in self.classes.items() if why],
            "steps": [found._asdict() for found in self.found],
        }


def _cells(share: float, ulps: Sequence[float], largest: float) -> list[str]:
    median = float(np.median(ulps)) if ulps else 0.0
    said = f"{median:.0f} ULP" if median < 1e4 else f"{median:.0e} ULP"
    return [_percent(share), said if median else "-", report.difference(largest)]


def _percent(share: float) -> str:
    """Return a share in percent, 0 only where it is exactly zero."""
    return "0" if share == 0 else "< 0.1 %" if share < 0.0005 else f"{100 * share:.1f} %"


GRADIENT_SOURCES = {
    "locals": "its gradient of each rank",
    "products": "  its products of matrices",
    "sums": "  its sums over rows (biases)",
    "autograd": "  the rest of its autograd",
    "ranks": "ranks added in order 0, 1, ...",
    "rows": "all rows in one batch",
    "gradient": "all of these: its gradient",
}
WEIGHT_SOURCES = {
    "through": "its gradient, our Adam",
    "adam": "our gradient, its Adam",
    "moments": "  its fused multiply-adds in m, v",
    "root": "  its square root",
    "folding": "  its bias correction",
    "left": "  all else of its Adam",
}


class Comparison:
    """PyTorch's run, and what causes each difference from ours. On rank 0 alone.

    Attributes
    ----------
    sources : by key of GRADIENT_SOURCES and WEIGHT_SOURCES. steps : of the two runs, for the table and JSON.
    mistakes : (what was planted, how far it is off, class, why). replayed : in how many steps the replay had
        the ranks' bits. errors : the largest distance from float64, ours and PyTorch's, of a unit's largest
        element, in eps; of gradients, and of weights after one update.
    """

    def __init__(self, args: argparse.Namespace, size: int, side: ModuleType) -> None:
        self.side, self.size, self.model, self.adam = side, size, MLP(args.dims), Adam(lr=args.lr)
        self.reference = Reference(self.model, size, Precision.named("fp32"), self.adam, args.init_seed)
        self.own, self.net = side.Network(self.model), side.Network(self.model)
        self.exact = side.Network(self.model, side.torch.float64)
        # The same with all but one thing by numpy, and with all of them.
        self.mixed = {
            "products": side.Network(self.model, by_numpy=("sums",)),
            "sums": side.Network(self.model, by_numpy=("products",)),
            "autograd": side.Network(self.model, by_numpy=("products", "sums")),
        }
        self.own.load(self.reference.split(self.reference.theta))
        self.optimizer = self.own.adam(self.adam)
        self.sources = {key: Source(label) for key, label in {**GRADIENT_SOURCES, **WEIGHT_SOURCES}.items()}
        self.steps: list[dict[str, Any]] = []
        self.mistakes: list[tuple[str, Apart, str, str]] = []
        self.replayed = 0
        self.errors = {"gradient": [0.0, 0.0], "weights": [0.0, 0.0]}
        self.amplified = (0.0, 0, 0.0, 0.0)
        self.root_share = 0.0
        # No chain of additions is longer: forward, backward, and over rows.
        self.terms = sum(args.dims[:-1]) + sum(args.dims[1:]) + args.batch * size

    def step(self, batches: Sequence[MicroBatches], seen: Observed, loss: float) -> None:
        """Take PyTorch's step on all ranks' rows, and find the causes on our weights of this step."""
        reference, rows = self.reference, _together(batches)
        expected = reference.step(batches)
        same = [seen.gradients[u] for u in sorted(seen.gradients)], seen.theta
        if (
            loss == expected
            and not apart(same[0], self._means).share
            and not apart(same[1], self.reference.split(reference.theta)).share
        ):
            self.replayed += 1
        their_loss = self.own.backward(rows)
        grads = self.own.grads()
        self.optimizer.step()
        self.steps.append(
            {
                "step": reference.steps_done,
                "loss_ours": loss,
                "loss_torch": their_loss,
                "grads": apart(grads, same[0])._asdict(),
                "theta": apart(self.own.units(), same[1])._asdict(),
            }
        )
        self._explain(batches, rows)

    # Causes.

    def _explain(self, batches: Sequence[MicroBatches], rows: Batch) -> None:
        means, before = self._means, self.reference.split(self.reference.before[0])
        for network in (self.net, self.exact, *self.mixed.values()):
            network.load(before)
        locals_ = self._locals(self.net, batches)
        in_rank_order = self.side.mean_in_rank_order(locals_)
        self.net.backward(rows)
        gradient = self.net.grads()
        self.exact.backward(rows)
        exact = self.exact.grads()
        self._measure("gradient", means, gradient, exact)

        self._gradient("locals", self._reduced(locals_), means, exact)
        for key, network in self.mixed.items():
            self._gradient(key, self._reduced(self._locals(network, batches)), means, exact)
        ours = [[turn[u] for u in sorted(turn)] for turn in self.reference.locals[0]]
        self._gradient("ranks", self.side.mean_in_rank_order(ours), means, exact)
        self._gradient("rows", gradient, in_rank_order, exact)
        self._gradient("gradient", gradient, means, exact)
        self._explain_update(gradient)
        if not self.mistakes:
            self._plant(rows, locals_, before)

    def _explain_update(self, gradient: Units) -> None:
        reference, means, after = self.reference, self._means, self.reference.split(self.reference.theta)
        before, (m, v) = self.reference.split(reference.before[0]), self._moments()
        through = self.reference.split(reference.updated(dict(enumerate(gradient)), 1.0))
        found = apart(through, after)
        self.sources["through"].note(found, "the gradient's")
        u, place = found.at
        if found.largest > self.amplified[0]:
            values = float(means[u][place]), float(gradient[u][place])
            self.amplified = (found.largest, reference.steps_done, *values)

        step = reference.steps_done
        theirs = self.net.update(self.adam, before, means, m, v, step)
        given = list(zip(before, means, m, v, strict=True))
        exact = [textbook(self.adam, *unit, step) for unit in given]
        self._measure("weights", after, theirs, exact)

        def with_theirs(*parts: str) -> list[np.ndarray]:
            return [written_out(self.adam, *unit, step, parts, self.side.root) for unit in given]

        self._weights("adam", theirs, after, exact)
        for part in ("moments", "root", "folding"):
            self._weights(part, with_theirs(part), after, exact)
        self._weights("left", with_theirs("moments", "root", "folding"), theirs, exact)
        v = self.reference.split(reference.state["v"])
        roots = apart([self.side.root(unit) for unit in v], [np.sqrt(unit) for unit in v])
        self.root_share = max(self.root_share, roots.share)

    def _gradient(self, key: str, observed: Units, expected: Units, exact: Units) -> None:
        kind, why = self._class(observed, self.reference.split(self.reference.theta))
        near = max(_distance(units, exact) for units in (observed, self._means)) <= self.terms
        self.sources[key].note(apart(observed, expected), *_judged(kind, why, near))

    def _weights(self, key: str, observed: Units, expected: Units, exact: Units) -> None:
        kind, why = self._class(self._means, observed)
        after = self.reference.split(self.reference.theta)
        # A handful of operations, each half a unit in the last place.
        near = max(_distance(units, exact) for units in (observed, after)) <= 4
        self.sources[key].note(apart(observed, expected), *_judged(kind, why, near))

    def _class(self, grads: Units, theta: Units) -> tuple[str, str]:
        """Return parting's class of a gradient and weights in place of ours, and its evidence."""
        nothing: list[Any] = [None] * self.size
        state: list[dict[str, np.ndarray]] = [{} for _ in theta]
        weights = list(theta)
        seen = Observed(dict(enumerate(grads)), weights, weights, state, nothing, nothing, [])
        found = parting.find(self.reference.steps_done, seen, self.reference, self.terms)
        return (found.cause, found.why) if found else ("-", "")

    def _plant(self, rows: Batch, locals_: Sequence[Units], before: Units) -> None:
        """Make mistakes on PyTorch's side, and see what class they get."""
        ours = self.reference.split(self.reference.theta)
        self.net.load(before)
        self.net.backward(rows, self.side.mean_over_rows)
        planted = [("loss: mean over rows only", self.net.grads())]
        if self.size > 1:
            total = [np.sum(unit, axis=0) for unit in zip(*locals_, strict=True)]
            without = [
                np.sum(unit[:-1], axis=0) / np.float32(self.size) for unit in zip(*locals_, strict=True)
            ]
            planted += [("the last rank left out", without), ("ranks added, not averaged", total)]
        for what, grads in planted:
            self.mistakes.append((what, apart(grads, self._means), *self._class(grads, ours)))
        found = apart(before, ours)
        self.mistakes.append(("weights not updated", found, *self._class(self._means, before)))

    def _measure(self, what: str, ours: Units, theirs: Units, exact: Units) -> None:
        for i, units in enumerate((ours, theirs)):
            self.errors[what][i] = max(self.errors[what][i], _distance(units, exact))

    # Parts.

    @property
    def _means(self) -> list[np.ndarray]:
        return [self.reference.means[u] for u in sorted(self.reference.means)]

    def _moments(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return Adam's m and v before this step's update."""
        state = self.reference.before[1]
        return self.reference.split(state["m"]), self.reference.split(state["v"])

    def _locals(self, network: Any, batches: Sequence[MicroBatches]) -> list[list[np.ndarray]]:
        """Return each rank's gradient."""
        found = []
        for rank in range(self.size):
            network.backward(batches[rank][0])
            found.append(network.grads())
        return found

    def _reduced(self, locals_: Sequence[Units]) -> list[np.ndarray]:
        """Return the mean of each rank's gradient in the order of our ring."""
        other = copy.copy(self.reference)
        other.locals = [[dict(enumerate(units)) for units in locals_]]
        return [other.mean_if(u) for u in range(len(self.model.units))]

    @property
    def unexplained(self) -> list[str]:
        """What has no class that two right runs may have."""
        allowed = (*NO_MISTAKE, "the gradient's")
        return [s.label.strip() for s in self.sources.values() if not set(s.kinds()) <= set(allowed)]


def _judged(kind: str, why: str, near: bool) -> tuple[str, str]:
    """Return the class: "rounding" for what parting does not know, if float64 is near."""
    return ("rounding", "") if kind == "unknown" and near else (kind, why)


def _distance(units: Units, exact: Units) -> float:
    """Return the largest distance from float64, of a unit's largest element, in eps of float32."""
    worst = 0.0
    for unit, true in zip(units, exact, strict=True):
        scale = float(np.abs(true).max())
        error = float(np.abs(unit - true).max())
        worst = max(worst, error / (scale * EPS) if scale else error / EPS)
    return worst


def _together(batches: Sequence[MicroBatches]) -> Batch:
    """Return all ranks' rows as one batch, in rank order."""
    rows = [batches[rank][0] for rank in range(len(batches))]
    return np.concatenate([x for x, _ in rows]), np.concatenate([y for _, y in rows])


def textbook(
    adam: Adam, theta: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, step: int
) -> np.ndarray:
    """Return `theta` after an update in float64 (Kingma and Ba 2015, algorithm 1)."""
    theta, g, m, v = (array.astype(np.float64) for array in (theta, g, m, v))
    m = adam.beta1 * m + (1 - adam.beta1) * g
    v = adam.beta2 * v + (1 - adam.beta2) * g * g
    m, v = m / (1 - adam.beta1**step), v / (1 - adam.beta2**step)
    return theta - adam.lr * m / (np.sqrt(v) + adam.eps)


def written_out(
    adam: Adam,
    theta: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    step: int,
    theirs: Iterable[str],
    root: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """Return `theta` after an update in float32 as we round it, or in the parts `theirs` as PyTorch does.

    theirs : "moments": ``m.lerp_(g, 1 - beta1)`` and ``v.addcmul_(g, g)`` with fused multiply-adds; "root":
    `root` for numpy's; "folding": corrections for bias where the textbook has them, not in rate and eps.
    """
    f = np.float32
    rest1, rest2 = f(1 - adam.beta1), f(1 - adam.beta2)
    if "moments" in theirs:
        m = _fused(rest1, g - m, m)
        v = _fused(rest2 * g, g, v * f(adam.beta2))
    else:
        m = f(adam.beta1) * m + rest1 * g
        v = f(adam.beta2) * v + rest2 * (g * g)
    c1, c2 = 1 - adam.beta1**step, (1 - adam.beta2**step) ** 0.5
    root_of_v = root(v) if "root" in theirs else np.sqrt(v)
    if "folding" in theirs:
        return theta + (f(-adam.lr / c1) * m) / (root_of_v / f(c2) + f(adam.eps))
    return theta - f(adam.lr * c2 / c1) * (m / (root_of_v + f(adam.eps * c2)))


def _fused(a: Any, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a b + c rounded once: in float64 the product of two floats is exact."""
    return (np.float64(a) * b.astype(np.float64) + c).astype(np.float32)


# What is printed.


def lines(args: argparse.Namespace, c: Comparison) -> list[str]:
    """Return the tables, and why they are not zero."""
    scheme = next(S for S in SCHEMES if S.key == args.scheme)
    ranks, rows = report.counted(c.size, "rank"), report.counted(args.batch, "row")
    config: Any = np.show_config(mode="dicts")
    blas = config.get("Build Dependencies", {}).get("blas", {}).get("name", "unknown BLAS")
    said = {
        "ours": f"{scheme.name} on {ranks}, {rows} each; numpy {np.__version__}, {blas}",
        "theirs": f"one process, all {report.counted(args.batch * c.size, 'row')}; {c.side.describe()}",
        "model": f"{c.model.describe()}: {c.model.n_params:,} parameters, seed {args.init_seed}",
        "both": f"{report.counted(args.steps, 'step')} of seed {args.seed}, float32, {c.adam.describe()}",
    }
    out = ["Beside PyTorch"]
    for name, text in said.items():
        out += report.wrapped(f"  {name:<7} ", text)
    out += ["", "Each on its own weights: the gradient of a step, the weights θ after it"]
    table = [["step", "loss, ours", "PyTorch's", "max |Δgrad|", "differ", "max |Δθ|", "differ"]]
    for s in c.steps:
        cells = [text for name in ("grads", "theta") for text in _two(s[name])]
        table.append([str(s["step"]), f"{s['loss_ours']:.8f}", f"{s['loss_torch']:.8f}", *cells])
    out += report.table(table, left=0)
    heads = ["class", "differ", "median", "largest"]
    for title, sources in (
        ("The gradient from our weights, with PyTorch's in place of ours", GRADIENT_SOURCES),
        ("The weights after one update of ours, with PyTorch's in place of ours", WEIGHT_SOURCES),
    ):
        out += ["", title, *report.table([["", *heads], *(c.sources[key].row() for key in sources)], left=2)]
    out += ["", *why_not_zero(c)]
    out += ["", "Mistakes planted on PyTorch's side in step 1: what they look like"]
    planted = [[what, kind, *_cells(f.share, [f.median_ulp], f.largest)] for what, f, kind, _ in c.mistakes]
    return [*out, *report.table([["", *heads], *planted], left=2), ""]


def _two(found: dict[str, Any]) -> list[str]:
    return [report.difference(found["largest"]), _percent(found["share"])]


def why_not_zero(c: Comparison) -> list[str]:
    """Return the causes in words, each with its evidence from this run."""
    s, said = c.sources, []
    every = "in all steps" if len(c.steps) > 1 else "in this step"
    if s["locals"].changes:
        text = "PyTorch's BLAS and numpy's add up the terms of a product in orders of their own"
        text += ", and so do their sums over rows. " if s["sums"].changes else ". "
        if s["autograd"].changes:
            text += "That is not all: with both by numpy PyTorch's gradient still has other bits."
        else:
            text += f"That is all: with these by numpy, PyTorch's autograd has our bits {every}."
        said.append(("products", text))
    for kind, why in s["ranks"].classes.items():
        if why:
            said.append(("order", f"{kind}: {why}; ours is that of a ring."))
    if s["rows"].changes:
        text = "one product over the rows of all ranks adds in another order than a sum of one for each rank."
        said.append(("rows", text))
    ours, theirs = c.errors["gradient"]
    text = f"neither is the right one: from float64 ours is {ours:.1f} eps away, PyTorch's {theirs:.1f} (eps "
    text += f"{EPS:.1e} of a unit's largest element); {c.terms} terms may cost {c.terms} eps."
    said.append(("float64", text))
    largest, step, mine, other = c.amplified
    if largest:
        text = (
            "Adam divides by √v + eps, so a small gradient moves θ as far as a large one, and its rounding, "
        )
        text += "large beside it, moves θ too. Where θ parts most after one update, in "
        text += f"step {step}, the gradient is {mine:.5g}, PyTorch's {other:.5g}, eps {c.adam.eps:g}."
        said.append(("through", text))
    if s["adam"].changes:
        ours, theirs = c.errors["weights"]
        text = "the same formula, rounded elsewhere: fused multiply-adds, a square root "
        text += f"({_percent(c.root_share)} of PyTorch's are not the nearest float), and the correction for "
        text += "bias, which we fold into rate and eps. "
        left = "have other bits" if s["left"].changes else f"give PyTorch's bits {every}"
        text += f"Written out in numpy, these three {left}. From float64 ours is {ours:.2f} eps away, "
        text += f"PyTorch's {theirs:.2f}."
        said.append(("Adam", text))
    text = (
        "printed, not trained on: PyTorch's is one float32 mean over all rows, ours the mean of the ranks'."
    )
    if any(step["loss_ours"] != step["loss_torch"] for step in c.steps):
        said.append(("loss", text))
    steps = len(c.steps)
    text = f"rank 0 replayed our {report.counted(c.size, 'rank')}, and had their bits in {c.replayed} of "
    said.append(("replay", f"{text}{report.counted(steps, 'step')}."))
    out = ["Why it is not zero"]
    for name, text in said:
        out += report.wrapped(f"  {name:<9} ", text[0].upper() + text[1:])
    return out


def document(args: argparse.Namespace, c: Comparison) -> dict[str, Any]:
    """Return what --json writes."""
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "certificate")}
    return {
        "schema": SCHEMA,
        "settings": {**settings, "ranks": c.size, "torch": c.side.describe(), "numpy": np.__version__},
        "steps": c.steps,
        "sources": {key: source.document() for key, source in c.sources.items()},
        "mistakes": [
            {"what": what, "class": kind, "evidence": why, **found._asdict()}
            for what, found, kind, why in c.mistakes
        ],
        "errors_eps": {what: {"ours": e[0], "torch": e[1]} for what, e in c.errors.items()},
        "replayed_steps": c.replayed,
        "unexplained": c.unexplained,
    }


# The runs.


def main(argv: Sequence[str]) -> int:
    """Run on every rank; return the exit code."""
    if {"-h", "--help"} & set(argv):
        if launched_rank() == 0:
            parser().print_help()
        return 0
    try:
        comm = Communicator()
    except MPIMissing as error:
        return _complain(error, 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without θ gets a question mark.
        sys.stdout.reconfigure(errors="replace")
    with comm.ending_job_on_error():
        try:
            return run(comm, argv)
        except SharedMistake as error:
            return _complain(error, 2)
        except NotFinite as error:
            return _complain(error, 1)


def _complain(error: Exception, code: int) -> int:
    """Say in one line, from one process, what is wrong; return `code`."""
    if launched_rank() == 0:
        print(f"compare_torch: error: {error}", file=sys.stderr, flush=True)
    return code


def run(comm: Communicator, argv: Sequence[str]) -> int:
    """Compare, and print on rank 0; return the exit code. Collective."""
    files: list[report.JsonFile] = []
    side = None
    with comm.together():
        args = parser().parse_args(argv)
        if comm.rank == 0:
            try:
                import torch_side as side
            except ImportError as error:
                if error.name != "torch":
                    raise
                raise ValueError("expected PyTorch, which is not installed here: pip install torch") from None
            asked = [("--certificate", path) for path in args.certificate or ()]
            asked += [("--json", args.json)] if args.json is not None else []
            files = [report.JsonFile(path, option) for option, path in asked]
            if len({file.path for file in files}) < len(files):
                raise ValueError("--certificate and --json: expected different files, got one twice")
    model = MLP(args.dims)
    S = next(S for S in SCHEMES if S.key == args.scheme)
    scheme = S(model, comm, precision="fp32", optimizer=Adam(lr=args.lr), init_seed=args.init_seed)
    stream = SeedStream(args.seed, args.batch, args.dims[0], args.dims[-1]).global_batches(comm.size)
    # PyTorch's one process has all rows.
    alone = comm.split(comm.rank)
    found = Comparison(args, comm.size, side) if side is not None else None
    chains = Certificates(found) if found is not None and args.certificate else None
    for _ in range(args.steps):
        batches = next(stream)
        loss = scheme.step(*batches[comm.rank])
        seen = parting.observe(scheme, [])
        data = checks.data_digest(comm, batches[comm.rank])
        with comm.root_works():
            if found is not None and seen is not None:
                found.step(batches, seen, loss)
                if chains is not None:
                    chains.append(found, seen, data, checks.data_digest(alone, [_together(batches)]))
    alone.free()
    code, wrong = 0, []
    with comm.root_works():
        if found is not None:
            documents = [*(chains.documents(args, found) if chains else []), document(args, found)]
            wrong = [file.write(said) for file, said in zip(files, documents, strict=False)]
            written = chains is not None and not any(wrong)
            wrong.append(report.say(lines(args, found) + (chains.lines(args) if chains and written else [])))
            wrong += [report.say([f"NOT EXPLAINED: {name}"]) for name in found.unexplained]
            code = 0 if not found.unexplained and found.replayed == args.steps else 1
    return report.finish(comm, code, wrong)


class Certificates:
    """The digests of both runs: how a loop that is not ours writes them. On rank 0 alone."""

    def __init__(self, c: Comparison) -> None:
        self.ours, self.theirs = (certificate.Chain(c.model.units) for _ in range(2))
        self.ours.append(0, params=c.reference.split(c.reference.theta))
        self.theirs.append(0, params=c.own.units())

    def append(self, c: Comparison, seen: Observed, our_data: int, their_data: int) -> None:
        """Append the links of a step: arrays in, digests kept. Data comes as digests of its rows."""
        step, grads = c.steps[-1], [seen.gradients[u] for u in sorted(seen.gradients)]
        self.ours.append(step["step"], params=seen.theta, grads=grads, loss=step["loss_ours"], data=our_data)
        self.theirs.append(
            step["step"],
            params=c.own.units(),
            grads=c.own.grads(),
            loss=step["loss_torch"],
            data=their_data,
        )

    def documents(self, args: argparse.Namespace, c: Comparison) -> list[dict[str, Any]]:
        """Return both certificates."""
        shared = {"model": c.model.describe(), "seed": args.seed, "init_seed": args.init_seed}
        made = []
        for name, chain, ranks, blas in (
            (args.scheme, self.ours, c.size, f"numpy {np.__version__}"),
            ("torch", self.theirs, 1, c.side.describe()),
        ):
            made.append(certificate.document({name: chain}, {**shared, "ranks": ranks, "blas": blas}))
        return made

    def lines(self, args: argparse.Namespace) -> list[str]:
        """Return what comparing the two files says, as `python -m zero_mpi compare` prints it."""
        ours, theirs = (certificate.read(path) for path in args.certificate)
        found, differ = certificate.compare(ours, theirs), certificate.settings_that_differ(ours, theirs)
        return compare.lines(*args.certificate, found, differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
