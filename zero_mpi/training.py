"""Training: what a job asks of a step: accumulation, clipping, a loss scale, a schedule, frozen units.

Not for: doing it. The loop (engine.py) and the tools of schemes (schemes/base.py) do, each in one place.
"""

import math
from dataclasses import dataclass, field

from .precision import MOST

# It is divided out again: what float32 holds must hold its inverse, too.
SMALLEST_SCALE = 3e-39


@dataclass(frozen=True)
class LossScale:
    """Multiply the loss's gradient, so that small gradients survive 16 bits; divided out again in the update.

    A step in which any rank's gradient overflows is skipped by all. A dynamic scale then halves, and doubles
    after `growth_every` steps without overflow (as PyTorch's GradScaler does, with its numbers).

    Parameters
    ----------
    initial : the scale at the start. dynamic : whether it changes. growth_every : steps.
    floor : a dynamic scale that would fall below it ends the run.

    Raises
    ------
    ValueError : a value outside its range.
    """

    initial: float = 65536.0
    dynamic: bool = True
    growth_every: int = 2000
    floor: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("initial", self.initial), ("floor", self.floor)):
            if not SMALLEST_SCALE <= value <= MOST:
                raise ValueError(
                    f"loss scale, {name}: expected a number from {SMALLEST_SCALE} to {MOST}, got {value}"
                )
        if not isinstance(self.growth_every, int) or self.growth_every < 1:
            raise ValueError(
                f"loss scale, growth_every: expected at least 1 whole step, got {self.growth_every}"
            )

    def describe(self) -> str:
        """Return the words for it in a report."""
        if not self.dynamic:
            return f"{self.initial:g}, fixed"
        return (
            f"dynamic from {self.initial:g}, doubles after {self.growth_every} good steps, "
            f"not below {self.floor:g}"
        )


class ScaleState:
    """The loss scale of a running scheme: 1 where no scale was asked for. The same on every rank."""

    def __init__(self, spec: LossScale | None) -> None:
        self.spec = spec
        self.value = 1.0 if spec is None else spec.initial
        self.good_steps = 0

    def good(self) -> None:
        """Take note of a step without overflow."""
        if self.spec is None or not self.spec.dynamic:
            return
        self.good_steps += 1
        if self.good_steps == self.spec.growth_every:
            self.value, self.good_steps = 2 * self.value, 0

    def overflowed(self) -> bool:
        """Take note of a skipped step; return whether training can go on."""
        if self.spec is None:
            return False
        if not self.spec.dynamic:
            return True
        if self.value / 2 < self.spec.floor:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a factor of the optimizer's, by update.

    Parameters
    ----------
    kind : "constant", or "cosine": half a cosine, 1 at the first update after the warm-up, and 0 where one
        more than the last would be (as PyTorch's CosineAnnealingLR).
    warmup : updates over which the factor rises linearly to 1. updates : all of them, for "cosine".

    Raises
    ------
    ValueError : a value outside its range.
    """

    kind: str = "constant"
    warmup: int = 0
    updates: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "cosine"):
            raise ValueError(f"schedule: expected constant or cosine, got {self.kind}")
        if self.warmup < 0:
            raise ValueError(f"warmup: expected at least 0 updates, got {self.warmup}")
        if self.kind == "cosine" and (self.updates is None or self.updates <= self.warmup):
            raise ValueError(
                f"schedule: expected more updates than the warm-up's {self.warmup}, got {self.updates}"
            )

    def factor(self, update: int) -> float:
        """Return the factor for `update`, 1 for the first."""
        if update <= self.warmup:
            return update / self.warmup
        if self.kind == "constant" or self.updates is None:
            return 1.0
        done = (update - 1 - self.warmup) / (self.updates - self.warmup)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


@dataclass(frozen=True)
class Training:
    """How a step is made.

    Parameters
    ----------
    accumulate : micro-batches of a step, K.
    reduce_every : "step" or "micro-batch": when gradients are reduced. None: as the scheme does by default.
    clip_norm : the largest global norm of the gradient that reaches the update; None for no limit.
    loss_scale : None for none.
    schedule : the learning rate by update; constant if not given.
    freeze : units that are not trained.

    Raises
    ------
    ValueError : a value outside its range; TypeError : another type of loss scale or schedule.
    """

    accumulate: int = 1
    reduce_every: str | None = None
    clip_norm: float | None = None
    loss_scale: LossScale | None = None
    schedule: Schedule = field(default_factory=Schedule)
    freeze: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate: expected at least 1 micro-batch, got {self.accumulate}")
        for name, value, kind in (
            ("loss_scale", self.loss_scale, LossScale),
            ("schedule", self.schedule, Schedule),
        ):
            if not isinstance(value, kind) and not (name == "loss_scale" and value is None):
                raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
        if self.reduce_every not in (None, "step", "micro-batch"):
            raise ValueError(f"reduce_every: expected step or micro-batch, got {self.reduce_every}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise ValueError(f"clip_norm: expected a finite number above 0, got {self.clip_norm}")

    def check_units(self, units: int) -> None:
        """Raise ValueError if it freezes what a model of so many units has not, or all of it."""
        for u in self.freeze:
            if not 0 <= u < units:
                raise ValueError(f"freeze: expected units from 0 to {units - 1}, got {u}")
        if len(set(self.freeze)) == units:
            raise ValueError(f"freeze: expected at least one of {units} units to train, got all frozen")
