"""A worked example: a scheme that nobody has, which gets all checks by one line in the register.

It shards gradients but not optimizer state: 2 + 12 bytes a parameter are whole, 2/N cut. Each rank adds its
shard up as gradients are made, and updates its own block, all that it has gradients of; then parameters are
gathered. Most of its optimizer state is never touched, which is why nobody builds it.
"""

from fractions import Fraction

import numpy as np
import pytest
from helpers import failing, run_with, settings
from threadworld import run_ranks

from zero_mpi import faults, formulas, train
from zero_mpi.data import SeedStream
from zero_mpi.injection import FAULTS
from zero_mpi.model import MLP
from zero_mpi.optim import SGD
from zero_mpi.run import run
from zero_mpi.schemes import SCHEMES, Scheme
from zero_mpi.training import Training


class GradientsAlone(Scheme):
    """Gradients are sharded; parameters and optimizer state are whole on every rank."""

    name = "ZeRO-G"
    key = "zerog"
    sharded = ("grads",)
    reduce_every = "micro-batch"

    def full_params(self, u):
        return self.widened(u)

    def release_params(self, u):
        """Nothing to free: this rank holds the unit whole."""

    def grad_ready(self, u):
        self.reduce_scatter(u)

    def backward_done(self, units):
        """Nothing left to reduce: every unit was, when it was ready."""

    def update(self, scale):
        for u in self.trained:
            self.step_optimizer(u, scale)
            self.all_gather(u, self.params[u])


# What it says of itself: its sharded bands, when it reduces, and what it gathers after an update.
CLAIM = formulas.Claim(("grads",), "micro-batch", 0, 1, 0)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The one line: in the package it stands in zero_mpi/schemes/__init__.py."""
    monkeypatch.setitem(SCHEMES, GradientsAlone, CLAIM)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["mixed", "fp32"])
def test_it_learns_the_same_bits_and_holds_and_sends_what_its_formula_says(size, precision):
    result = run_with(size=size, precision=precision)
    assert list(result["learning"]["schemes"]) == ["dp", "zero1", "zero2", "zero3", "zerog"]
    assert failing(result) == []


def test_its_closed_forms_follow_from_its_claim():
    row = run_with(size=4)["memory"]["zerog"]
    assert row["formula"] == "14 + 2/N"
    assert row["mean_bytes_per_param"] == 14.5
    result = run_with(size=4)["traffic"]["zerog"]
    assert result["formula"] == "2(N-1)/N" and Fraction(result["formula_units"]) == Fraction(3, 2)


def test_it_gets_every_option_too():
    options = {
        "model": MLP((7, 5, 4, 3)),
        "data": SeedStream(7, 4, 7, 3, 2),
        "training": Training(accumulate=2, clip_norm=0.1, freeze=(1,)),
        "optimizer": SGD(momentum=0.9),
    }
    results = run_ranks(3, lambda comm: run(comm, settings(**options), list(SCHEMES)))
    assert failing(results[0]) == []
    # It reduces as ZeRO-2 does, so it is in its family.
    assert results[0]["learning"]["schemes"]["zerog"]["compared_with"] == "zero2"


def test_a_mistake_in_it_is_found_like_any_other(monkeypatch):
    monkeypatch.setattr(GradientsAlone, "all_gather", lambda self, u, full: None)
    result = run_with(size=3)
    assert failing(result) == ["learning", "traffic"]
    found = result["learning"]["schemes"]["zerog"]["parting"]
    assert (found["phase"], found["step"], found["cause"]) == ("replica", 1, "stale")


def test_a_claim_that_is_wrong_fails_memory(monkeypatch):
    monkeypatch.setitem(SCHEMES, GradientsAlone, CLAIM._replace(sharded=("grads", "optimizer")))
    assert failing(run_with(size=3)) == ["memory"]
    assert np.isfinite(run_with(size=3)["learning"]["schemes"]["zerog"]["final_loss"])


def test_faults_can_be_made_in_it_too(monkeypatch, capsys):
    # As where it is registered before the faults are.
    everywhere = FAULTS["send-twice"]._replace(schemes=tuple(S.key for S in SCHEMES))
    monkeypatch.setitem(FAULTS, "send-twice", everywhere)
    codes = run_ranks(2, lambda comm: faults.main(comm, ["--only", "send-twice"]))
    out = capsys.readouterr().out
    assert codes == [0, 0] and "5 of 5 caught" in out
    assert "under: D data parallel, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3, G ZeRO-G." in " ".join(out.split())
    assert "--scheme all|dp|zero1|zero2|zero3|zerog;" in train.parser().format_help()


def test_two_schemes_whose_names_end_alike_have_letters_of_their_own(monkeypatch):
    class Other(GradientsAlone):
        name = "Other-3"

    monkeypatch.setitem(SCHEMES, Other, CLAIM)
    letters = list(faults._letters().values())
    assert letters == ["D", "1", "2", "3", "G", "(5)"]
