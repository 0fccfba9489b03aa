"""Scheme: the bands a rank holds, and the tools that the five answers of a scheme are written with.

Not for: any scheme's own answers (dp.py, zero1.py, zero2.py, zero3.py), nor for the order in which they are
asked (engine.py).
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..comm import Communicator
from ..data import Batch
from ..engine import train_step
from ..layout import Blocks
from ..memory import Ledger
from ..model import Model
from ..optim import Adam, Optimizer
from ..precision import Precision, all_finite, convert, describe, dtype_of, in_wide, round_through
from ..reducers import Reducer, Ring
from ..traffic import Traffic
from ..training import ScaleState, Training

# Elements whose squares are summed at a time: part of the norm's definition, since it decides its last bits.
NORM_PIECE = 8192


class Scheme:
    """Train `model` on the ranks of `comm`; subclasses answer five questions about a unit.

    Parameters
    ----------
    model : what to train (model/protocol.py). It owns no parameters.
    comm : an mpi4py communicator, or a Communicator of ours, whose ranks are used with a count of bytes of
        the scheme's own; it must live as long as the scheme. None is the MPI world.
    precision : "mixed" (float16 parameters and gradients), "bf16", "fp32", or a Precision.
    optimizer : an element-wise optimizer (optim.py). Ranks compare its `describe()`.
    training : how a step is made: micro-batches, clipping, loss scale, frozen units (training.py).
    init_seed : of the initial weights.
    reducer : builds the reducer from (communicator, ledger) (reducers.py).

    Attributes
    ----------
    units, blocks : numbers of the units, and the cut of each into blocks of ranks (layout.py).
    params, grads : one array for each unit, whole or this rank's shard of it, as `sharded` says. A frozen
        unit has parameters alone.
    optimizer_state : one dict of float32 arrays for each unit: the optimizer's slots, and "master" where
        parameters have 16 bits.
    trained : the units that are not frozen.
    ledger, comm : what counts this scheme's bytes at rest, and on the wire.
    reducer, scale : what sums and gathers, and the loss scale as it now is.
    steps_begun, steps_done : steps asked for, and those that were not skipped.
    step_traffic, grad_norm, skipped : of the last step: what this rank sent and received, the global norm of
        the gradient (None unless it is clipped), and why no weight changed ("" where they did).

    Raises
    ------
    ValueError : ranks do not share model, precision, optimizer, training or initial weights. All ranks raise
        the same. TypeError : `comm` is no communicator.

    Notes
    -----
    Collective. All three bands are allocated here and live as long as the scheme. Schemes that share ranks
    take their steps in the same order on every rank: messages say collective and unit, not whose they are.
    """

    name: str
    key: str
    sharded: tuple[str, ...]
    reduce_every: str

    def __init__(
        self,
        model: Model,
        comm: Any = None,
        *,
        precision: str | Precision = "mixed",
        optimizer: Optimizer | None = None,
        training: Training | None = None,
        init_seed: int = 0,
        reducer: Callable[[Communicator, Ledger], Reducer] = Ring,
    ) -> None:
        self.model = model
        self.comm = comm.counted_apart() if isinstance(comm, Communicator) else Communicator(comm)
        self.ledger = Ledger()
        with self.comm.together():
            # A host may lack the package of a dtype.
            self.precision = precision if isinstance(precision, Precision) else Precision.named(precision)
            self._params_dtype = dtype_of(self.precision.params)
            self._grads_dtype = dtype_of(self.precision.grads)
            self._reduce_dtype = dtype_of(self.precision.reduce)
            self._gather_dtype = dtype_of(self.precision.gather)
        self.optimizer = Adam() if optimizer is None else optimizer
        self.training = Training() if training is None else training
        self.reducer = reducer(self.comm, self.ledger)
        self.units = range(len(model.units))
        self.blocks = [Blocks(numel, self.comm.size) for numel in model.units]
        self.steps_begun = self.steps_done = self.micro_batch = 0
        self.scale = ScaleState(self.training.loss_scale)
        self.step_traffic = Traffic()
        self.grad_norm: float | None = None
        self.skipped = ""
        # Units whose gradient was not finite in this step: this rank's own, and the sum in its block.
        self.overflowed: set[int] = set()
        self.sums_overflowed: set[int] = set()
        wanted = self.training.reduce_every
        if wanted == "step" and self.reduce_every == "micro-batch":
            # Gradients that wait for the end of the step are whole until then.
            self.sharded = tuple(band for band in self.sharded if band != "grads")
        self.reduce_every = wanted or self.reduce_every
        # Whether a gradient is reduced once: then the sum over ranks is all there is to divide.
        self._reduced_once = self.training.accumulate == 1 or self.reduce_every == "step"
        self._local_gradients: dict[int, np.ndarray] = {}
        self._gathered: dict[int, np.ndarray] = {}
        with self.comm.together():
            if model.n_params != sum(model.units):
                raise ValueError(
                    f"n_params: expected the sum of units, {sum(model.units)}, got {model.n_params}"
                )
            self.training.check_units(len(model.units))
            self.trained = [u for u in self.units if u not in self.training.freeze]
            weights = self._allocate(init_seed)
        self.comm.agree(
            scheme=self.key,
            model=model.describe(),
            units=model.units,
            precision=describe(self.precision),
            optimizer=f"{self.optimizer.describe()}, keeps {', '.join(self.optimizer.slots) or 'nothing'}",
            training=self.training,
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

    def backward_done(self, units: Sequence[int]) -> None:
        """Finish the gradients of `units`: afterwards what this rank owns of them is the mean over ranks.

        Asked after the last micro-batch, of all units that are trained; or, with `reduce_every`
        "micro-batch", of each unit as soon as it is ready.
        """
        raise NotImplementedError

    def update(self, scale: float) -> None:
        """Update the parameters with the gradients times `scale`."""
        raise NotImplementedError

    # What a user calls, and what the loop and the checks ask of any scheme.

    def forget_transients(self) -> None:
        """Drop what a step leaves that an error of the model has ended."""
        self._local_gradients.clear()
        self._gathered.clear()

    def step(self, *micro_batches: Batch | None) -> float:
        """Train on this rank's batch, or its K micro-batches; return the mean loss of all rows before that.

        Parameters
        ----------
        micro_batches : as many as `training.accumulate`, one (x, y) each: float32, (rows, n_in) and
            (rows, n_out). Rows may differ between ranks and micro-batches, and be none. A single None says
            that this rank has no batch left.

        Raises
        ------
        OutOfBatches : a rank has none left; NotFinite : a loss or a gradient is not finite. All ranks raise
            the same.

        Notes
        -----
        Collective.
        """
        return train_step(self, micro_batches)

    def full_theta(self) -> np.ndarray | None:
        """Return all float32 weights in unit order, shape (n_params,), on rank 0; None on the others.

        The master where parameters have 16 bits, else the parameters. Collective; control traffic.
        """
        if self.comm.rank != 0:
            for u in self.units:
                self.comm.gather_to_root(self.owned_theta(u).astype(np.float32, copy=False), None)
            return None
        theta = np.empty(self.model.n_params, np.float32)
        start = 0
        for u, blocks in zip(self.units, self.blocks, strict=True):
            unit = theta[start : start + blocks.numel]
            self.comm.gather_to_root(
                self.owned_theta(u).astype(np.float32, copy=False),
                [unit[blocks.of(rank)] for rank in range(blocks.count)],
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
        every scheme by the same: a rank that holds a band whole owns its own block of it. A frozen unit has
        "params" alone.
        """
        own = self.blocks[u].of(self.comm.rank)
        yield "params", own.start, own.stop, self._owned_of("params", u, self.params[u])
        if u in self.training.freeze:
            return
        yield "grads", own.start, own.stop, self._owned_of("grads", u, self.grads[u])
        for slot, state in self.optimizer_state[u].items():
            yield slot, own.start, own.stop, self._owned_of("optimizer", u, state)

    def owned_theta(self, u: int) -> np.ndarray:
        """Return this rank's block of the float32 weights of unit `u`, a view.

        A frozen unit has no master: its parameters are its weights, in their own dtype.
        """
        arrays = {name: array for name, _, _, array in self.owned(u)}
        return arrays.get("master", arrays["params"])

    def replica(self, u: int) -> np.ndarray | None:
        """Return unit `u` of the parameters as this rank holds it whole, or None if it holds a shard."""
        return None if "params" in self.sharded else self.params[u]

    def squares(self) -> float:
        """Return the sum of the squares of the gradient elements this rank owns, in float64.

        Added unit by unit, each in pieces of `NORM_PIECE` elements, so that it is the same in every scheme.
        """
        total = 0.0
        wide = self.ledger.empty("norm scratch", NORM_PIECE, np.dtype(np.float64))
        for u in self.trained:
            mine = self._owned_of("grads", u, self.grads[u])
            for start in range(0, mine.size, NORM_PIECE):
                piece = wide[: mine[start : start + NORM_PIECE].size]
                convert(mine[start : start + NORM_PIECE], piece)
                piece *= piece
                total += float(piece.sum())
        return total

    # The tools.

    def grad_buffer(self, u: int) -> np.ndarray:
        """Return where the local gradient of unit `u` is to be written: float32, shape (numel,).

        Where it is all that a whole float32 band will hold, the band itself; else a buffer that the tools
        below take.
        """
        whole = "grads" not in self.sharded and self._grads_dtype == np.float32
        if whole and self.training.accumulate == 1 and self.reduce_every == "step":
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
        """Add the local gradient of unit `u`, rounded to the gradients' dtype, to the whole gradient band.

        Where gradients are reduced every micro-batch there is nothing to add up: it stays in its buffer.
        """
        if self.reduce_every == "micro-batch" or u not in self._local_gradients:
            return
        gradient, band = self._local_gradients.pop(u), self.grads[u]
        if self.micro_batch == 0:
            convert(gradient, band)
        else:
            round_through(gradient, gradient, self._grads_dtype)
            add_into(band, gradient)

    def reduce_scatter(self, u: int) -> None:
        """Sum the gradient of unit `u` over the ranks, and keep this rank's own block of it. Collective."""
        total = self.reducer.reduce_scatter(u, self._unreduced(u))
        self._keep(u, total, self._owned_of("grads", u, self.grads[u]))

    def all_reduce(self, u: int) -> None:
        """Sum the gradient of unit `u` over the ranks, and keep all of it. Collective."""
        gradient, band = self._unreduced(u), self.grads[u]
        if not self._reduced_once:
            self.reducer.all_reduce(u, gradient, _as_it_is)
            self._keep(u, gradient, band)
            return
        # The owner finishes its block, once for all.
        self.reducer.all_reduce(u, gradient, lambda own: self.average(u, own, own))
        if gradient is not band:
            convert(gradient, band)

    def average(self, u: int, total: np.ndarray, into: np.ndarray) -> None:
        """Divide sums over N ranks and K micro-batches by N K into `into`, rounded to its stored dtype.

        `into` may be `total`, which may be overwritten in any case. A sum may overflow where its terms did
        not, if the reduce dtype has 16 bits, or the gradients that micro-batches were added up in.
        """
        # Rounded to the reduce dtype on the way, where that is another.
        mean = into if into.dtype == total.dtype else total
        in_wide(np.divide, total, self.comm.size * self.training.accumulate, mean)
        if mean is not into:
            convert(mean, into)
        blocks = self.blocks[u]
        # Of a sum that is whole on every rank, each looks at its own block.
        mine = into[blocks.of(self.comm.rank)] if into.size == blocks.numel else into
        if not all_finite(mine):
            self.sums_overflowed.add(u)

    def _unreduced(self, u: int) -> np.ndarray:
        """Return this rank's gradient of unit `u`, rounded to the gradients' dtype, in the reduce dtype.

        Shape (numel,). It is about to be mixed with the others', so a value that is not finite is noted now.
        """
        if self.reduce_every == "step":
            self.keep_local(u)
            gradient = self.grads[u]
            wire = self._on_wire("reduce", u, gradient, self._reduce_dtype)
            if wire is not gradient:
                convert(gradient, wire)
        else:
            gradient = self._local_gradients.pop(u)
            wire = self._on_wire("reduce", u, gradient, self._reduce_dtype)
            round_through(gradient, wire, self._grads_dtype)
        if not all_finite(wire):
            self.overflowed.add(u)
        return wire

    def _keep(self, u: int, total: np.ndarray, into: np.ndarray) -> None:
        """Put a sum over ranks where this rank keeps it; once the step's last is in, make it the mean."""
        if self._reduced_once:
            self.average(u, total, into)
            return
        if self.micro_batch == 0:
            convert(total, into)
        else:
            add_into(into, total)
        if self.micro_batch == self.training.accumulate - 1:
            self.average(u, into, into)

    def step_optimizer(self, u: int, scale: float) -> None:
        """Update what this rank has gradient and optimizer state of in unit `u`: all, or its own block."""
        optimizer = self.optimizer
        params = self._updated_of("params", u, self.params[u])
        grads = self._updated_of("grads", u, self.grads[u])
        state = {
            slot: self._updated_of("optimizer", u, array) for slot, array in self.optimizer_state[u].items()
        }
        theta = state.get("master", params)
        numel = optimizer.scratch_numel(theta.size)
        scratch = self.ledger.empty("optimizer scratch", numel, np.dtype(np.float32))
        lr = optimizer.lr * self.training.schedule.factor(self.steps_done)
        for part, decay in self._groups(u):
            optimizer.update(
                theta[part],
                grads[part],
                {slot: state[slot][part] for slot in optimizer.slots},
                self.steps_done,
                scale=scale,
                lr=lr,
                decay=decay,
                scratch=scratch,
            )
        if theta is not params:
            convert(theta, params)

    def _groups(self, u: int) -> Iterator[tuple[slice, bool]]:
        """Yield the parts of what `step_optimizer` updates of unit `u`, and whether their weights decay.

        Matrices do, biases do not, as is usual. A part may be empty on this rank.
        """
        held = slice(0, self.blocks[u].numel)
        if self._updates_own_block:
            held = self.blocks[u].of(self.comm.rank)
        if not self.optimizer.weight_decay:
            yield slice(0, held.stop - held.start), False
            return
        start = 0
        for _, shape in self.model.tensors(u):
            stop = start + math.prod(shape)
            low, high = (min(max(edge, held.start), held.stop) - held.start for edge in (start, stop))
            yield slice(low, high), len(shape) > 1
            start = stop

    # How bands are laid out.

    def _allocate(self, init_seed: int) -> str:
        """Allocate the three bands, fill in the initial weights, and return their digest."""
        self.params: list[np.ndarray] = []
        self.grads: list[np.ndarray] = []
        self.optimizer_state: list[dict[str, np.ndarray]] = []
        fingerprint = hashlib.blake2b(digest_size=8)
        slots = (("master",) if self.precision.master else ()) + tuple(self.optimizer.slots)
        initial = self.model.init(init_seed)
        for u in self.units:
            theta = _initial(next(initial, None), u, self.blocks[u].numel)
            fingerprint.update(theta.data)
            self.params.append(self._band("params", u, self._params_dtype, theta))
            trained = u in self.trained
            self.grads.append(self._band("grads", u, self._grads_dtype) if trained else np.empty(0))
            self.optimizer_state.append(
                {
                    slot: self._band(
                        "optimizer", u, np.dtype(np.float32), theta if slot == "master" else None
                    )
                    for slot in slots
                    if trained
                }
            )
            # One unit at a time: the next one is made only when this one is gone.
            del theta
        return fingerprint.hexdigest()

    def _band(self, band: str, u: int, dtype: np.dtype, first: np.ndarray | None = None) -> np.ndarray:
        """Return what this rank holds of unit `u` in a band: whole or its own block, `first` or zeros."""
        own = self.blocks[u].of(self.comm.rank) if band in self.sharded else slice(0, self.blocks[u].numel)
        array = self.ledger.empty(band, own.stop - own.start, dtype)
        if first is None:
            array[...] = 0
        else:
            convert(first[own], array)
        return array

    def _owned_of(self, band: str, u: int, array: np.ndarray) -> np.ndarray:
        """Return this rank's own block of `array`, a view: `array` itself where the band is sharded."""
        return array if band in self.sharded else array[self.blocks[u].of(self.comm.rank)]

    @property
    def _updates_own_block(self) -> bool:
        """Whether this rank lacks gradient or optimizer state of the others' blocks."""
        return "grads" in self.sharded or "optimizer" in self.sharded

    def _updated_of(self, band: str, u: int, array: np.ndarray) -> np.ndarray:
        """Return the part of `array` that this rank updates, a view."""
        return self._owned_of(band, u, array) if self._updates_own_block else array

    def _on_wire(self, purpose: str, u: int, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return `array` itself if it has the wire's dtype, else a transient array to travel in."""
        if array.dtype == dtype:
            return array
        return self.ledger.empty(f"{purpose} wire", self.blocks[u].numel, dtype)


def add_into(band: np.ndarray, gradient: np.ndarray) -> None:
    """Add `gradient` to `band`, both (n,), in the wider of their dtypes and float32; round to the band's."""
    in_wide(np.add, band, gradient, band)


def _initial(theta: Any, u: int, numel: int) -> np.ndarray:
    """Return the initial weights of unit `u` if they are what a model has to yield."""
    if not isinstance(theta, np.ndarray):
        got = "no more" if theta is None else type(theta).__name__
        raise TypeError(f"init: expected the weights of unit {u}, a numpy array, got {got}")
    if theta.dtype != np.float32 or theta.shape != (numel,) or not theta.flags.c_contiguous:
        how = "" if theta.flags.c_contiguous else "non-contiguous "
        raise ValueError(
            f"init: expected weights of unit {u} that are contiguous float32 of shape ({numel},), "
            f"got {how}{theta.dtype} of shape {theta.shape}"
        )
    return theta


def _as_it_is(total: np.ndarray) -> None:
    """Leave a sum as it is."""
