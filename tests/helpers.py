"""What several test files share: settings of small runs, and what their verdicts say.

Not for: fixtures and launched jobs (conftest.py).
"""

from threadworld import run_ranks

from zero_mpi.data import SeedStream
from zero_mpi.model import MLP
from zero_mpi.optim import Adam
from zero_mpi.precision import Precision
from zero_mpi.run import Settings, run
from zero_mpi.schemes import SCHEMES

WIRES = [
    ("fp32", "float32", "float32"),
    ("fp32", "float64", "float64"),
    ("fp32", "float16", "float32"),
    ("fp32", "bfloat16", "float32"),
    ("mixed", "float32", "float32"),
    ("mixed", "float16", "float16"),
    ("mixed", "bfloat16", "float64"),
    ("bf16", "float32", "float32"),
    ("bf16", "bfloat16", "bfloat16"),
]
M = MLP((7, 5, 3))


def named(precision, reduce="float32", gather="float32"):
    """Return a Precision, which may be given as one."""
    return precision if isinstance(precision, Precision) else Precision.named(precision, reduce, gather)


def settings(model=M, precision="mixed", reduce="float32", gather="float32", **options):
    n_in, n_out = (model.dims[0], model.dims[-1]) if isinstance(model, MLP) else (4, 4)
    defaults = {
        "model": model,
        "data": SeedStream(7, 4, n_in, n_out),
        "precision": named(precision, reduce, gather),
        "optimizer": Adam(),
        "steps": 5,
    }
    return Settings(**{**defaults, **options})


def failing(result):
    return [verdict["check"] for verdict in result["verdicts"] if not verdict["holds"]]


def says(result, check):
    return next(verdict["says"] for verdict in result["verdicts"] if verdict["check"] == check)


def run_with(schemes=None, size=3, **options):
    return run_ranks(size, lambda comm: run(comm, settings(**options), schemes or list(SCHEMES)))[0]
