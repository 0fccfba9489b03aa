"""The oracle: the same training in one process, in plain loops. No scheme, no reducer, no blocks of ours.

Not for: speed or memory; it keeps every rank's gradient at once.

It shares only the model, whose gradients it does not vouch for, the names of dtypes, the numbers of the
settings, and memory.py's aligned buffers, in which a product finds its operands. Blocks are numpy's own
`array_split`, the optimizers are written out again, and each block is summed in the order that its reducer
promises.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .data import MicroBatches
from .memory import Ledger
from .model import Model
from .optim import SGD, Adam, Optimizer
from .precision import Precision, dtype_of
from .training import Training

# A sum as a tree: a rank, or two trees that are added.
Tree = Any


def in_turn(ranks: Sequence[int]) -> Tree:
    """Return the tree that adds the ranks one after the other."""
    tree: Tree = ranks[0]
    for rank in ranks[1:]:
        tree = (tree, rank)
    return tree


def halving(b: int, size: int) -> Tree:
    """Return the tree of recursive halving: pairs of ranks first where there are too many, then halves."""
    remaining = 1
    while 2 * remaining <= size:
        remaining *= 2
    folded = size - remaining
    leaves: list[Tree] = [(2 * i, 2 * i + 1) if i < folded else i + folded for i in range(remaining)]

    def tree(i: int, distance: int) -> Tree:
        if distance == remaining:
            return leaves[i]
        return tree(i, 2 * distance), tree(i ^ distance, 2 * distance)

    return tree(b // 2 if b < 2 * folded else b - folded, 1)


# The optimizers that are written out again here.
OPTIMIZERS = (Adam, SGD)

# In what order each reducer sums block b over `size` ranks.
ORDERS: dict[str, Callable[[int, int], Tree]] = {
    "ring": lambda b, size: in_turn([(b + 1 + i) % size for i in range(size)]),
    "reversed-ring": lambda b, size: in_turn([(b - 1 - i) % size for i in range(size)]),
    "rank-order": lambda b, size: in_turn(range(size)),
    "naive": lambda b, size: in_turn(range(size)),
    "recursive-halving": halving,
}

# Elements whose squares are summed at a time, as the contract of the norm says.
NORM_PIECE = 8192


class Reference:
    """Replay a run of `size` ranks alone.

    Parameters
    ----------
    model, precision, optimizer, init_seed, training : as the schemes' own.
    size : number of ranks N to replay.
    reduce_every : "step" or "micro-batch": when the replayed scheme reduces gradients.
    reducer : whose order of summation to replay, a key of `ORDERS`.

    Attributes
    ----------
    theta : float32, shape (n_params,): the master weights, or the parameters where there is no master.
    norm : of the last step's gradient, where it is clipped. skipped : whether the last step was.
    locals : of the last step: ``locals[k][rank][u]`` is the gradient of micro-batch k, unit u, as it is
        stored before it is reduced.
    means, before : of the last step: the mean gradient of each unit, float32; and theta and state before it.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        precision: Precision,
        optimizer: Optimizer,
        init_seed: int,
        training: Training | None = None,
        reduce_every: str = "step",
        reducer: str = "ring",
    ) -> None:
        self.model, self.size, self.precision, self.optimizer = model, size, precision, optimizer
        self.training = Training() if training is None else training
        self.reduce_every, self.order = reduce_every, ORDERS[reducer]
        units = list(model.init(init_seed))
        for u in self.training.freeze:
            # No master is kept of what is not trained.
            units[u] = units[u].astype(dtype_of(precision.params)).astype(np.float32)
        self.theta = np.concatenate(units)
        self.state = {slot: np.zeros_like(self.theta) for slot in optimizer.slots}
        self.steps_done = 0
        self.scale = 1.0 if self.training.loss_scale is None else self.training.loss_scale.initial
        self.good_steps = 0
        self.norm: float | None = None
        self.skipped = False
        self.locals: list[list[dict[int, np.ndarray]]] = []
        self.means: dict[int, np.ndarray] = {}
        self.means_before: dict[int, np.ndarray] = {}
        self.before: tuple[np.ndarray, dict[str, np.ndarray]] = self._copied()
        # How partial sums travel: as they are, unless `mean_if` asks what another wire would have given.
        self.sent_as: Callable[[np.ndarray], np.ndarray] = lambda partial: partial
        # Aligned as the schemes' buffers are: BLAS may give other bits elsewhere.
        self._aligned = Ledger()

    def step(self, batches: Sequence[MicroBatches]) -> float:
        """Train on the micro-batches of each rank; return the mean loss over all rows before the update."""
        accumulate = self.training.accumulate
        mine = [batches[rank] for rank in range(self.size)]
        rows = [[len(y) for _, y in micro] for micro in mine]
        every = sum(sum(row) for row in rows)
        losses = [0.0] * self.size
        self.before, self.means_before, self.norm = self._copied(), self.means, None
        gradients: list[list[dict[int, np.ndarray]]] = []
        for k in range(accumulate):
            gradients.append([])
            for rank in range(self.size):
                weight = self.size * accumulate * rows[rank][k] / every
                loss, gradient = self._local(mine[rank][k], weight * self.scale)
                losses[rank] += weight * loss
                gradients[k].append(gradient)
        total = 0.0
        for loss in losses:
            total += loss
        total /= self.size * accumulate

        with np.errstate(over="ignore", invalid="ignore"):
            means = [self._mean_of_unit([[g[u] for g in turn] for turn in gradients]) for u in self._units()]
        finite = all(
            np.isfinite(mean).all() and all(np.isfinite(g[u].astype(np.float32)).all() for g in turn)
            for u, mean in zip(self._units(), means, strict=True)
            for turn in gradients
        )
        self.locals, self.means = gradients, dict(zip(self._units(), means, strict=True))
        if self._decide(finite):
            self._update(means)
        return total

    def _units(self) -> list[int]:
        """Return the units that are trained."""
        return [u for u in range(len(self.model.units)) if u not in self.training.freeze]

    def _local(self, batch: Any, scale: float) -> tuple[float, dict[int, np.ndarray]]:
        """Return one micro-batch's loss, and its gradient of each unit rounded to the gradients' dtype."""
        x, target = batch
        units = [self._place(unit) for unit in self.split(self._stored())]
        saved = []
        for u, params in enumerate(units):
            x, kept = self.model.forward(u, params, x)
            saved.append(kept)
        loss, dy = self.model.loss(x, target) if len(target) else (0.0, np.zeros_like(x))
        if scale != 1.0:
            dy = dy * np.float32(scale)
        gradients = {}
        for u in reversed(range(self._units()[0], len(units))):
            out = self._place(np.zeros_like(units[u])) if u in self._units() else None
            dy = self.model.backward(u, units[u], saved[u], dy, out=out)
            if out is not None:
                with np.errstate(over="ignore"):
                    gradients[u] = out.astype(dtype_of(self.precision.grads))
        return loss, gradients

    def _mean_of_unit(self, gradients: list[list[np.ndarray]]) -> np.ndarray:
        """Return the mean of one unit, float32, from ``gradients[k][rank]`` of micro-batch k."""
        reduce, grads = dtype_of(self.precision.reduce), dtype_of(self.precision.grads)
        terms = self.size * len(gradients)
        wide: Any = np.float64 if reduce == np.float64 else np.float32
        if len(gradients) == 1:
            total = self._sum_over_ranks([g.astype(reduce) for g in gradients[0]])
        elif self.reduce_every == "step":
            kept = [[turn[rank] for turn in gradients] for rank in range(self.size)]
            total = self._sum_over_ranks([_added_up(turns, grads).astype(reduce) for turns in kept])
        else:
            sums = [self._sum_over_ranks([g.astype(reduce) for g in turn]) for turn in gradients]
            total = _added_up(sums, grads)
            # The sum is kept in the gradients' dtype, and so is divided there.
            reduce = grads
            wide = np.float32
        mean = (total.astype(wide) / wide(terms)).astype(reduce) if terms > 1 else total
        return mean.astype(grads).astype(np.float32)

    def _sum_over_ranks(self, gradients: list[np.ndarray]) -> np.ndarray:
        """Return the sum of one unit in the reduce dtype, each block in the order its reducer promises."""
        split = [np.array_split(gradient, self.size) for gradient in gradients]

        def add(tree: Tree, b: int) -> np.ndarray:
            if isinstance(tree, tuple):
                partial = add(tree[0], b)
                # What a hop would send, if it were not sent as it is.
                return self.sent_as(partial) + add(tree[1], b)
            return split[tree][b]

        return np.concatenate([add(self.order(b, self.size), b) for b in range(self.size)])

    def _decide(self, finite: bool) -> bool:
        """Return whether to update; keep the loss scale."""
        spec = self.training.loss_scale
        self.skipped = not finite
        if spec is None or not spec.dynamic:
            return finite
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        return finite

    def mean_if(
        self,
        u: int,
        order: Callable[[int, int], Tree] | None = None,
        reduce_every: str | None = None,
        sent_as: Callable[[np.ndarray], np.ndarray] | None = None,
        reduce: str | None = None,
        changed: Callable[[np.ndarray], np.ndarray] = lambda gradient: gradient,
    ) -> np.ndarray:
        """Return what the last step's mean gradient of unit `u` would have been under another arithmetic.

        Parameters
        ----------
        order : of summation, as in `ORDERS`. reduce_every : "step" or "micro-batch".
        sent_as : what becomes of a partial sum on its way. reduce : the name of another reduce dtype.
        changed : what becomes of a local gradient before it is reduced.

        Raises
        ------
        ValueError : no such reduce dtype here.
        """
        other = copy.copy(self)
        if reduce is not None:
            other.precision = dataclasses.replace(self.precision, reduce=reduce)
        other.order = order or self.order
        other.reduce_every = reduce_every or self.reduce_every
        other.sent_as = sent_as or self.sent_as
        with np.errstate(over="ignore", invalid="ignore"):
            return other._mean_of_unit([[changed(g[u]) for g in turn] for turn in self.locals])

    def updated(self, gradients: dict[int, np.ndarray], scale: float) -> np.ndarray:
        """Return the weights that the last step would have made of `gradients` times `scale`."""
        theta, state = self.before[0].copy(), {slot: a.copy() for slot, a in self.before[1].items()}
        self._apply(theta, state, gradients, scale)
        return theta

    def _copied(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        return self.theta.copy(), {slot: array.copy() for slot, array in self.state.items()}

    def _update(self, means: list[np.ndarray]) -> None:
        spec, units = self.training.loss_scale, self._units()
        scale = 1.0 / self.scale
        limit = self.training.clip_norm
        if limit is not None:
            self.norm = self._norm(means) / self.scale
            if self.norm > limit:
                scale *= limit / self.norm
        if spec is not None and spec.dynamic and self.good_steps == spec.growth_every:
            self.scale, self.good_steps = 2 * self.scale, 0
        self.steps_done += 1
        self._apply(self.theta, self.state, dict(zip(units, means, strict=True)), scale)

    def _apply(
        self,
        theta: np.ndarray,
        state: dict[str, np.ndarray],
        gradients: dict[int, np.ndarray],
        scale: float,
    ) -> None:
        """Update all units of `theta` and `state` in place with their gradients times `scale`."""
        thetas, states = self.split(theta), {s: self.split(a) for s, a in state.items()}
        for u, gradient in gradients.items():
            g = gradient if scale == 1.0 else gradient * np.float32(scale)
            self._step(thetas[u], g, {slot: states[slot][u] for slot in states}, self._decays(u))

    def _norm(self, means: list[np.ndarray]) -> float:
        """Return the norm of the mean gradient: squares in float64, added as their owners add them."""
        total = 0.0
        for rank in range(self.size):
            partial = 0.0
            for mean in means:
                mine = np.array_split(mean, self.size)[rank].astype(np.float64)
                for start in range(0, mine.size, NORM_PIECE):
                    piece = mine[start : start + NORM_PIECE]
                    partial += float((piece * piece).sum())
            total += partial
        return math.sqrt(total)

    def _decays(self, u: int) -> np.ndarray:
        """Return which elements of unit `u` decay: those of matrices."""
        return np.concatenate(
            [np.full(math.prod(shape), len(shape) > 1) for _, shape in self.model.tensors(u)]
        )

    def _step(
        self, theta: np.ndarray, g: np.ndarray, state: dict[str, np.ndarray], decays: np.ndarray
    ) -> None:
        """Update one unit's weights and state, which are views, by the whole formula at once."""
        optimizer: Any = self.optimizer
        lr = optimizer.lr * self._lr_factor()
        if isinstance(optimizer, SGD):
            if optimizer.momentum:
                state["momentum"][...] = np.float32(optimizer.momentum) * state["momentum"] + g
                g = state["momentum"]
            theta -= g * np.float32(lr)
            return
        beta1, beta2 = np.float32(optimizer.beta1), np.float32(optimizer.beta2)
        correction = np.sqrt(1 - optimizer.beta2**self.steps_done)
        rate = np.float32(lr * correction / (1 - optimizer.beta1**self.steps_done))
        eps = np.float32(optimizer.eps * correction)
        state["m"][...] = beta1 * state["m"] + np.float32(1 - optimizer.beta1) * g
        state["v"][...] = beta2 * state["v"] + np.float32(1 - optimizer.beta2) * (g * g)
        if optimizer.weight_decay:
            theta[decays] *= np.float32(1 - lr * optimizer.weight_decay)
        theta -= rate * (state["m"] / (np.sqrt(state["v"]) + eps))

    def _lr_factor(self) -> float:
        schedule, t = self.training.schedule, self.steps_done
        if t <= schedule.warmup:
            return t / schedule.warmup
        if schedule.kind == "cosine" and schedule.updates is not None:
            done = (t - 1 - schedule.warmup) / (schedule.updates - schedule.warmup)
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return 1.0

    def _stored(self) -> np.ndarray:
        """Return the weights as the parameters' dtype holds them, in float32."""
        return self.theta.astype(dtype_of(self.precision.params)).astype(np.float32)

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return all units of a flat vector, shape (n_params,), as views."""
        return np.split(flat, np.cumsum(self.model.units)[:-1])

    def _place(self, values: np.ndarray) -> np.ndarray:
        array = self._aligned.empty("reference", values.size, values.dtype)
        array[...] = values
        return array


def _added_up(turns: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Return the sum of one array for each micro-batch, rounded to `dtype` after each addition."""
    total = turns[0].astype(dtype)
    for turn in turns[1:]:
        wide: Any = np.float64 if np.float64 in (total.dtype, turn.dtype) else np.float32
        total = (total.astype(wide) + turn.astype(wide)).astype(dtype)
    return total
