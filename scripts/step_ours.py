"""One rank of our side of bench_step.py: times a step of each scheme, or watches where its time goes.

Not for: starting by hand; bench_step.py does, under mpiexec.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import zero_mpi.ring
import zero_mpi.schemes.base
from zero_mpi.comm import Communicator
from zero_mpi.data import Batch, SeedStream
from zero_mpi.memory import Ledger
from zero_mpi.model import MLP
from zero_mpi.optim import Adam
from zero_mpi.schemes import SCHEMES, Scheme

# The learning rate of both sides: the larger models leave all bounds with 0.01.
LR = 1e-3

# Steps before the timed ones; their losses are compared.
WARM_UP = 3


def batches(dims: tuple[int, ...], rows: int, rank: int, size: int) -> Iterator[Batch]:
    """Return a rank's batches: the seed's first eight, over and over."""
    stream = SeedStream(7, rows, dims[0], dims[-1]).global_batches(size)
    return itertools.cycle([next(stream)[rank][0] for _ in range(8)])


def timed(step: Callable[[Batch], float], given: Iterator[Batch], steps: int) -> tuple[float, list[float]]:
    """Return the median time of `steps` steps in ms, and the losses of those before them."""
    losses = [step(next(given)) for _ in range(WARM_UP)]
    times_s = []
    for _ in range(steps):
        batch = next(given)
        began = time.perf_counter()
        step(batch)
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s) * 1e3, losses


class NumpyAlone:
    """The same model and the same Adam on one process: no scheme, no ledger, no MPI."""

    def __init__(self, model: MLP) -> None:
        self.model, self.adam, self.steps = model, Adam(lr=LR), 0
        self.params = list(model.init())
        self.grads = [np.zeros_like(theta) for theta in self.params]
        self.state = [{slot: np.zeros_like(theta) for slot in self.adam.slots} for theta in self.params]

    def step(self, batch: Batch) -> float:
        """Train on `batch`; return the loss before."""
        x, target = batch
        saved = []
        for u, theta in enumerate(self.params):
            x, ends = self.model.forward(u, theta, x)
            saved.append(ends)
        loss, dy = self.model.loss(x, target)
        for u in reversed(range(len(self.params))):
            dy = self.model.backward(u, self.params[u], saved.pop(), dy, out=self.grads[u])
        self.steps += 1
        for theta, grad, state in zip(self.params, self.grads, self.state, strict=True):
            self.adam.update(theta, grad, state, self.steps)
        return loss


def build(scheme_class: type[Scheme], model: MLP, comm: Communicator) -> Scheme:
    """Return the scheme to time. Collective."""
    return scheme_class(model, comm, precision="fp32", optimizer=Adam(lr=LR))


def times(model: MLP, comm: Communicator, rows: int, steps: int) -> dict[str, Any]:
    """Return for each scheme the ms a step on the slowest rank, and the first mean losses. Collective."""
    found = {}
    for scheme_class in SCHEMES:
        scheme = build(scheme_class, model, comm)
        ms, losses = timed(scheme.step, batches(model.dims, rows, comm.rank, comm.size), steps)
        found[scheme.key] = {"ms": float(comm.allgather_scalar(ms).max()), "losses": losses}
    return found


class Watch:
    """Split the time that passes among labels: a function's own, without what it calls that is watched.

    Attributes
    ----------
    seconds : by label since `restart`.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all times; what is not watched counts as Python."""
        self.seconds: dict[str, float] = {}
        self._label, self._since = "Python", time.perf_counter()

    def turn(self, label: str) -> str:
        """Count under `label` from now on; return the label until now."""
        before, now = self._label, time.perf_counter()
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._label, self._since = label, now
        return before

    def over(self, label: str, owner: Any, *names: str) -> None:
        """Watch functions of `owner`, an object, a class or a module, under `label`."""
        for name in names:
            setattr(owner, name, self._watched(label, getattr(owner, name)))

    def _watched(self, label: str, function: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            before = self.turn(label)
            try:
                return function(*args, **options)
            finally:
                self.turn(before)

        return call


class Watched(np.ndarray):
    """An array whose matrix products are watched: numpy hands us each operation on it."""

    watch: Watch

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, Watched) else x for x in inputs]
        if "out" in options:
            options["out"] = tuple(
                x.view(np.ndarray) if isinstance(x, Watched) else x for x in options["out"]
            )
        before = self.watch.turn("BLAS") if ufunc is np.matmul else ""
        result = getattr(ufunc, method)(*plain, **options)
        if before:
            self.watch.turn(before)
        return result.view(Watched) if isinstance(result, np.ndarray) else result


def profile(model: MLP, comm: Communicator, rows: int, steps: int) -> dict[str, Any]:
    """Return for each scheme the mean ms a step on this rank by where they go. Collective.

    Functions are watched from outside, for the rest of this process's life: the package knows nothing of it.
    """
    watch = Watched.watch = Watch()
    base, ring = zero_mpi.schemes.base, zero_mpi.ring
    transport = comm.transport
    watch.over(
        "MPI",
        transport,
        *(name for name in dir(transport) if callable(getattr(transport, name)) and name[0] != "_"),
    )
    watch.over("Adam", Adam, "update")
    watch.over("sums", ring, "_pass_and_add", "_pass_on")
    watch.over("copy", base, "convert", "round_through", "add_into")
    watch.over("copy", Scheme, "average")
    watch.over("fin.", base, "all_finite")
    watch.over("model", MLP, "forward", "backward", "loss")
    watch.over("mem.", Ledger, "empty")
    found = {}
    for scheme_class in SCHEMES:
        scheme = build(scheme_class, model, comm)
        full_params = scheme.full_params
        scheme.full_params = lambda u, plain=full_params: plain(u).view(Watched)
        given = batches(model.dims, rows, comm.rank, comm.size)
        for _ in range(WARM_UP):
            scheme.step(next(given))
        watch.restart()
        for _ in range(steps):
            x, y = next(given)
            scheme.step((x.view(Watched), y))
        watch.turn("Python")
        found[scheme.key] = {"parts_ms": {label: s * 1e3 / steps for label, s in watch.seconds.items()}}
        # An attribute of an object that holds its bound method: a cycle, which would keep the scheme alive.
        del scheme.full_params, full_params, scheme
    return found


def main() -> None:
    """Print what was asked for as JSON, on rank 0."""
    p = argparse.ArgumentParser()
    p.add_argument("--dims", type=lambda text: tuple(map(int, text.split(","))), required=True)
    p.add_argument("--rows", type=int, required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--alone", action="store_true")
    p.add_argument("--profile", action="store_true")
    args = p.parse_args()
    model = MLP(args.dims)
    if args.alone:
        ms, losses = timed(NumpyAlone(model).step, batches(model.dims, args.rows, 0, 1), args.steps)
        print(json.dumps({"numpy": {"ms": ms, "losses": losses}}))
        return
    comm = Communicator()
    with comm.ending_job_on_error():
        found = (profile if args.profile else times)(model, comm, args.rows, args.steps)
    if comm.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
