"""Small models for tests: units of any size, one element included, and a gradient that is the batch.

Not for: users; the package ships zero_mpi.model.MLP.
"""

import numpy as np


class TinyUnits:
    """Unit u of n elements computes ``x * p[0] + sum(p[1:])``: any n from 1 up is a unit."""

    def __init__(self, units=(1, 2, 5)):
        self.units = tuple(units)
        self.n_params = sum(self.units)

    def init(self, seed=0):
        rng = np.random.default_rng(seed)
        for numel in self.units:
            yield rng.standard_normal(numel).astype(np.float32)

    def forward(self, u, params, x):
        return x * params[0] + params[1:].sum(dtype=np.float32), x

    def tensors(self, u):
        return (("scale", (1,)), ("sum", (self.units[u] - 1,)))

    def loss(self, y_hat, y):
        difference = y_hat - y
        return float(np.mean(difference * difference)), difference * np.float32(2 / y.size)

    def backward(self, u, params, saved, dy, out):
        if out is not None:
            out[0] = (dy * saved).sum(dtype=np.float32)
            out[1:] = dy.sum(dtype=np.float32)
        return dy * params[0] if u else None

    def describe(self):
        return f"tiny units {self.units}"


class Prepared:
    """One unit whose gradient is x, summed over rows: exact values can be asked for."""

    def __init__(self, numel=6, initial=0.0):
        self.units, self.n_params, self._initial = (numel,), numel, initial

    def init(self, seed=0):
        yield np.full(self.n_params, self._initial, np.float32)

    def forward(self, u, params, x):
        return x, None

    def tensors(self, u):
        return (("all", (self.n_params,)),)

    def loss(self, y_hat, y):
        return float(y_hat.mean()), y_hat

    def backward(self, u, params, saved, dy, out):
        out[...] = dy.sum(axis=0)

    def describe(self):
        return f"prepared {self.n_params}"
