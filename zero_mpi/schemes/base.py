"""Scheme: the bands a rank holds, and the tools that the five answers of a scheme are written with.

Not for: any scheme's own answers (dp.py, zero1.py, zero2.py, zero3.py), nor for the order in which they are
asked (engine.py).
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..comm import Communicator
from ..data import Batch
from ..engine import train_step
from ..layout import Blocks
from ..memory import Ledger
from ..model import Model
from ..optim import Adam
from ..precision import Precision, convert, describe, dtype_of, round_through
from ..ring import Ring
from ..traffic import Traffic


class Scheme:
    """Train `model` on the ranks of `comm`; subclasses answer five questions about a unit.

    Parameters
    ----------
    model : what to train (model/protocol.py). It owns no parameters.
    comm : an mpi4py communicator, or a Communicator of ours, whose ranks are used with a count of bytes of
        the scheme's own. None is the MPI world.
    precision : "mixed" (float16 parameters and gradients), "bf16", "fp32", or a Precision.
    optimizer : an element-wise optimizer.
    init_seed : of the initial weights.
    reducer : builds the reducer from (communicator, ledger).

    Attributes
    ----------
    params, grads : one array for each unit, whole or this rank's shard of it, as `sharded` says.
    optimizer_state : one dict of float32 arrays for each unit: the optimizer's slots, and "master" where
        parameters have 16 bits.
    ledger, comm : what counts this scheme's bytes at rest, and on the wire.
    step_traffic : what this rank sent and received in the last step.

    Raises
    ------
    ValueError : ranks do not share model, precision, optimizer or initial weights. All ranks raise the same.

    Notes
    -----
    Collective. All three bands are allocated here and live as long as the scheme.
    """

    name: str
    key: str
    sharded: tuple[str, ...]

    def __init__(
        self,
        model: Model,
        comm: Any = None,
        *,
        precision: str | Precision = "mixed",
        optimizer: Adam | None = None,
        init_seed: int = 0,
        reducer: Callable[[Communicator, Ledger], Any] = Ring,
    ) -> None:
        self.model = model
        self.comm = comm.counted_apart() if isinstance(comm, Communicator) else Communicator(comm)
        self.ledger = Ledger()
        self.precision = precision if isinstance(precision, Precision) else Precision.named(precision)
        self.optimizer = Adam() if optimizer is None else optimizer
        self.reducer = reducer(self.comm, self.ledger)
        self.units = range(len(model.units))
        self.blocks = [Blocks(numel, self.comm.size) for numel in model.units]
        self.steps_done = 0
        self.step_traffic = Traffic()
        self._params_dtype = dtype_of(self.precision.params)
        self._grads_dtype = dtype_of(self.precision.grads)
        self._reduce_dtype = dtype_of(self.precision.reduce)
        self._gather_dtype = dtype_of(self.precision.gather)
        self._local_gradients: dict[int, np.ndarray] = {}
        self._gathered: dict[int, np.ndarray] = {}
        with self.comm.together():
            weights = self._allocate(init_seed)
        self.comm.agree(
            scheme=self.key,
            model=model.describe(),
            units=model.units,
            precision=describe(self.precision),
            optimizer=self.optimizer,
            reducer=self.reducer.name,
            **{"initial weights": weights},
        )

    # The five questions.

    def full_params(self, u: int) -> np.ndarray:
        """Return unit `u` to compute with: float32, shape (numel,), aligned."""
        raise NotImplementedError

    def release_params(self, u: int) -> None:
        """Forget what `full_params` made."""
        raise NotImplementedError

    def grad_ready(self, u: int) -> None:
        """Take the local gradient of unit `u` from its buffer."""
        raise NotImplementedError

    def backward_done(self) -> None:
        """Finish the gradients: afterwards what this rank owns of them is the mean over ranks."""
        raise NotImplementedError

    def update(self, scale: float) -> None:
        """Update the parameters with the gradients times `scale`."""
        raise NotImplementedError

    # What a user calls.

    def step(self, batch: Batch) -> float:
        """Train on this rank's `batch`; return the mean over ranks of its loss before it. Collective."""
        return train_step(self, batch)

    def full_theta(self) -> np.ndarray | None:
        """Return all float32 weights in unit order, shape (n_params,), on rank 0; None on the others.

        The master where parameters have 16 bits, else the parameters. Collective; control traffic.
        """
        if self.comm.rank != 0:
            for u in self.units:
                self.comm.gather_to_root(self.owned_theta(u), None)
            return None
        theta = np.empty(self.model.n_params, np.float32)
        start = 0
        for u, blocks in zip(self.units, self.blocks, strict=True):
            unit = theta[start : start + blocks.numel]
            self.comm.gather_to_root(
                self.owned_theta(u), [unit[blocks.of(rank)] for rank in range(blocks.count)]
            )
            start += blocks.numel
        return theta

    def bytes_per_param(self) -> float:
        """Return the bytes of the three bands this rank holds, from arrays that exist, per parameter."""
        return self.ledger.resident_bytes / self.model.n_params

    def bytes_comm_per_rank(self) -> int:
        """Return the model bytes this rank sent in the last step."""
        return self.step_traffic.total(traffic="model").sent_bytes

    def owned(self, u: int) -> Iterator[tuple[str, int, int, np.ndarray]]:
        """Yield (name, lo, hi, array) for what this rank owns of unit `u`: elements lo to hi of each array.

        Names are "params", "grads", "master" and the optimizer's slots. Each element is owned by one rank, in
        every scheme by the same: a rank that holds a band whole owns its own block of it.
        """
        own = self.blocks[u].of(self.comm.rank)
        yield "params", own.start, own.stop, self._owned_of("params", u, self.params[u])
        yield "grads", own.start, own.stop, self._owned_of("grads", u, self.grads[u])
        for slot, state in self.optimizer_state[u].items():
            yield slot, own.start, own.stop, self._owned_of("optimizer", u, state)

    def owned_theta(self, u: int) -> np.ndarray:
        """Return this rank's block of the float32 weights of unit `u`, a view."""
        wanted = "master" if self.precision.master else "params"
        return next(array for name, _, _, array in self.owned(u) if name == wanted)

    def replica(self, u: int) -> np.ndarray | None:
        """Return unit `u` of the parameters as this rank holds it whole, or None if it holds a shard."""
        return None if "params" in self.sharded else self.params[u]

    # The tools.

    def grad_buffer(self, u: int) -> np.ndarray:
        """Return where the local gradient of unit `u` is to be written: float32, shape (numel,).

        A gradient band that is whole and float32 is written directly; else a buffer that `grad_ready` takes.
        """
        if "grads" not in self.sharded and self._grads_dtype == np.float32:
            return self.grads[u]
        buffer = self.ledger.empty("unit gradient", self.blocks[u].numel, np.dtype(np.float32))
        self._local_gradients[u] = buffer
        return buffer

    def widened(self, u: int) -> np.ndarray:
        """Return unit `u`, held whole, in float32: the band itself, or a transient copy."""
        if self._params_dtype == np.float32:
            return self.params[u]
        wide = self.ledger.empty("widened unit", self.blocks[u].numel, np.dtype(np.float32))
        convert(self.params[u], wide)
        return wide

    def gathered(self, u: int) -> np.ndarray:
        """Return unit `u` in float32, gathered from its owners; alive until `free_gathered`. Collective."""
        full = self.ledger.empty("gathered unit", self.blocks[u].numel, np.dtype(np.float32))
        self._gathered[u] = full
        self.all_gather(u, full)
        return full

    def free_gathered(self, u: int) -> None:
        """Drop what `gathered` made of unit `u`."""
        del self._gathered[u]

    def all_gather(self, u: int, full: np.ndarray) -> None:
        """Fill `full`, shape (numel,), with the parameters of unit `u` from their owners. Collective.

        They travel in the gather dtype, which holds the parameters' dtype exactly.
        """
        wire = self._on_wire("gather", u, full, self._gather_dtype)
        convert(self._owned_of("params", u, self.params[u]), wire[self.blocks[u].of(self.comm.rank)])
        self.reducer.all_gather(u, wire)
        if wire is not full:
            convert(wire, full)

    def keep_local(self, u: int) -> None:
        """Round the local gradient of unit `u` into the whole gradient band."""
        if u in self._local_gradients:
            convert(self._local_gradients.pop(u), self.grads[u])

    def local_gradient(self, u: int) -> np.ndarray:
        """Return the local gradient of unit `u`, rounded to the gradients' dtype, in the reduce dtype.

        A transient array, shape (numel,); the buffer it was written to is given up.
        """
        gradient = self._local_gradients.pop(u)
        wire = self._on_wire("reduce", u, gradient, self._reduce_dtype)
        round_through(gradient, wire, self._grads_dtype)
        return wire

    def band_gradient(self, u: int) -> np.ndarray:
        """Return unit `u` of a whole gradient band in the reduce dtype: itself, or a transient copy."""
        wire = self._on_wire("reduce", u, self.grads[u], self._reduce_dtype)
        if wire is not self.grads[u]:
            convert(self.grads[u], wire)
        return wire

    def reduce_scatter(self, u: int, gradient: np.ndarray) -> None:
        """Sum `gradient` over the ranks and keep the mean of this rank's own block. Collective.

        `gradient`, shape (numel,), in the reduce dtype, is overwritten.
        """
        mean = self.reducer.reduce_scatter(u, gradient)
        self.average(mean)
        convert(mean, self._owned_of("grads", u, self.grads[u]))

    def all_reduce(self, u: int, gradient: np.ndarray) -> None:
        """Sum `gradient` over the ranks and keep the mean of the whole unit. Collective.

        `gradient`, shape (numel,), in the reduce dtype, is overwritten.
        """
        self.reducer.all_reduce(u, gradient, self.average)
        if gradient is not self.grads[u]:
            convert(gradient, self.grads[u])

    def average(self, total: np.ndarray) -> None:
        """Divide sums over ranks by N, once, and round them to the gradients' dtype, in place."""
        if self.comm.size > 1:
            wide = np.float64 if total.dtype == np.float64 else np.float32
            np.divide(total, wide(self.comm.size), out=total, dtype=wide, casting="unsafe")
        round_through(total, total, self._grads_dtype)

    def step_optimizer(self, u: int, scale: float) -> None:
        """Update what this rank holds the optimizer state of in unit `u`, whole or its own block."""
        state = self.optimizer_state[u]
        params = self._beside_optimizer("params", u, self.params[u])
        grads = self._beside_optimizer("grads", u, self.grads[u])
        theta = state["master"] if self.precision.master else params
        numel = self.optimizer.scratch_numel(theta.size)
        scratch = self.ledger.empty("optimizer scratch", numel, np.dtype(np.float32))
        self.optimizer.update(theta, grads, state, self.steps_done, scale, scratch)
        if theta is not params:
            convert(theta, params)

    # How bands are laid out.

    def _allocate(self, init_seed: int) -> str:
        """Allocate the three bands, fill in the initial weights, and return their digest."""
        self.params: list[np.ndarray] = []
        self.grads: list[np.ndarray] = []
        self.optimizer_state: list[dict[str, np.ndarray]] = []
        fingerprint = hashlib.blake2b(digest_size=8)
        slots = (("master",) if self.precision.master else ()) + tuple(self.optimizer.slots)
        for u, theta in zip(self.units, self.model.init(init_seed), strict=True):
            fingerprint.update(theta.data)
            own = self.blocks[u].of(self.comm.rank)
            held = {band: slice(None) if band not in self.sharded else own for band in _BANDS}
            self.params.append(self._band("params", theta[held["params"]], self._params_dtype))
            self.grads.append(self._band("grads", np.zeros_like(theta[held["grads"]]), self._grads_dtype))
            state = {}
            for slot in slots:
                first = theta if slot == "master" else np.zeros_like(theta)
                state[slot] = self._band("optimizer", first[held["optimizer"]], np.dtype(np.float32))
            self.optimizer_state.append(state)
        return fingerprint.hexdigest()

    def _band(self, band: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
        array = self.ledger.empty(band, values.size, dtype)
        convert(values, array)
        return array

    def _owned_of(self, band: str, u: int, array: np.ndarray) -> np.ndarray:
        """Return this rank's own block of `array`, a view: `array` itself where the band is sharded."""
        return array if band in self.sharded else array[self.blocks[u].of(self.comm.rank)]

    def _beside_optimizer(self, band: str, u: int, array: np.ndarray) -> np.ndarray:
        """Return the part of `array` that this rank holds the optimizer state of, a view."""
        return self._owned_of(band, u, array) if "optimizer" in self.sharded else array

    def _on_wire(self, purpose: str, u: int, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return `array` itself if it has the wire's dtype, else a transient array to travel in."""
        if array.dtype == dtype:
            return array
        return self.ledger.empty(f"{purpose} wire", self.blocks[u].numel, dtype)


_BANDS = ("params", "grads", "optimizer")
