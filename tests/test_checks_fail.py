"""Each check, seen failing: break one thing, and the right verdict turns."""

import tracemalloc

import numpy as np
import pytest
from helpers import M, failing, run_with, says

from zero_mpi import formulas
from zero_mpi.model import MLP
from zero_mpi.reducers import Ring
from zero_mpi.schemes import DP, SCHEMES, ZeRO1, ZeRO2, ZeRO3


@pytest.fixture
def enter(monkeypatch):
    """Return a function that enters a faulty scheme beside the claim of the right one."""

    def register(cls, claim):
        monkeypatch.setitem(SCHEMES, cls, claim)
        return [DP, cls]

    return register


def test_nothing_fails_unbroken():
    assert failing(run_with()) == []


class FaultyRing(Ring):
    """All-reduces with its own reduce-scatter, so that every scheme meets the fault."""

    def all_reduce(self, u, x, finish):
        own = self.reduce_scatter(u, x)
        finish(own)
        lo = sum(formulas.block_numel(x.size, self.comm.size, r) for r in range(self.comm.rank))
        x[lo : lo + own.size] = own
        self.all_gather(u, x)


class RotatedRing(FaultyRing):
    """Starts each block one rank late: the same sums in another order."""

    def reduce_scatter(self, u, x):
        size, rank = self.comm.size, self.comm.rank
        rows = [np.frombuffer(row, x.dtype) for row in self.comm.allgather_bytes(x.tobytes())]
        own = super().reduce_scatter(u, x)
        lo = sum(formulas.block_numel(x.size, size, r) for r in range(rank))
        total = rows[(rank + 2) % size][lo : lo + own.size]
        for i in range(3, size + 2):
            total = total + rows[(rank + i) % size][lo : lo + own.size]
        own[...] = total
        return own


class WrongBlockRing(FaultyRing):
    """Hands each rank its neighbour's block of the sum."""

    def reduce_scatter(self, u, x):
        return super().reduce_scatter(u, np.roll(x, -formulas.block_numel(x.size, self.comm.size, 0)))


@pytest.mark.parametrize("reducer", [RotatedRing, WrongBlockRing])
def test_a_rotated_ring_parts_from_the_reference(reducer):
    # In float32: sums of three float16 gradients are almost always exact in float32, in any order.
    result = run_with(model=MLP((12, 12)), precision="fp32", reducer=reducer)
    # The rotated one takes its sums from gradients it passed around as control traffic, which is seen too.
    assert failing(result) == ["reference"] + ["traffic"] * (reducer is RotatedRing)
    assert "parts from data parallel in step 1" in says(result, "reference")


def test_a_missing_average_parts_from_the_reference(enter):
    class Summed(ZeRO3):
        key = "summed"

        def average(self, u, total, into):
            into[...] = total

    # Adam divides a constant factor out: only eps and rounding show it, which is why the check is on bits.
    result = run_with(enter(Summed, formulas.ZERO3))
    assert failing(result) == ["learning"]
    assert "ZeRO-3 parts from data parallel in step 1" in says(result, "learning")


def test_case_stale_replica_is_seen_where_owners_look_right(enter):
    class Stale(ZeRO1):
        key = "stale"

        def all_gather(self, u, full):
            if self.steps_done < 5:
                super().all_gather(u, full)

    result = run_with(enter(Stale, formulas.ZERO1))
    assert failing(result) == ["learning", "traffic"]
    row = result["learning"]["schemes"]["stale"]
    assert row["identical_steps"] == 4 and row["first_difference_step"] == 5
    assert row["replicas_differ_steps"] == 1
    # Owners' blocks alone, which is all that a gather sees, are the same.
    assert row["theta_digest"] == result["learning"]["schemes"]["dp"]["theta_digest"]


def test_a_unit_that_is_never_freed_fails_memory(enter):
    class Hoarding(ZeRO3):
        key = "hoarding"

        def free_gathered(self, u):
            pass

    result = run_with(enter(Hoarding, formulas.ZERO3))
    assert failing(result) == ["memory"]
    assert "of transient arrays outlive the step" in says(result, "memory")


def test_two_gathered_units_at_once_fail_memory(enter):
    class Late(ZeRO3):
        key = "late"

        def free_gathered(self, u):
            if self._gathered.keys() == {0, 1} or self.comm.phase == "backward":
                self._gathered.clear()

    result = run_with(enter(Late, formulas.ZERO3), model=MLP((7, 5, 3)))
    assert failing(result) == ["memory"]
    assert "gathered unit: peak 232 B, one unit at a time takes 160 B" in says(result, "memory")


def test_case_hidden_view_of_a_gathered_unit_fails_memory(enter):
    class Viewing(ZeRO3):
        key = "viewing"

        def free_gathered(self, u):
            self.kept = self._gathered[u][3:4]
            super().free_gathered(u)

    result = run_with(enter(Viewing, formulas.ZERO3))
    assert failing(result) == ["memory"]
    assert "160 B of transient arrays outlive the step" in says(result, "memory")


def test_a_copy_of_the_parameters_hidden_from_the_ledger_fails_the_audit(enter):
    class Hiding(ZeRO3):
        key = "hiding"

        def update(self, scale):
            super().update(scale)
            self.copy = np.concatenate([p.astype(np.float32) for p in self.params])

    schemes = enter(Hiding, formulas.ZERO3)
    try:
        result = run_with(schemes, size=1, model=MLP((30, 40, 30)), audit_memory=True)
    finally:
        tracemalloc.stop()
    assert failing(result) == ["audit"]
    assert "9880 B live outside the ledger" in says(result, "audit")


def test_a_transient_copy_of_the_model_fails_the_audit(enter):
    class Passing(ZeRO3):
        key = "passing"

        def backward_done(self, units):
            np.zeros(self.model.n_params, np.float32)

    schemes = enter(Passing, formulas.ZERO3)
    try:
        result = run_with(schemes, size=1, model=MLP((100, 200, 100)), audit_memory=True)
    finally:
        tracemalloc.stop()
    assert failing(result) == ["audit"]
    assert "more than the ledger's at the peak of a step" in says(result, "audit")


def test_every_message_sent_twice_fails_traffic(enter):
    class Twice(ZeRO1):
        key = "twice"

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            once = self.comm.sendrecv

            def twice(*message):
                once(*message)
                once(*message)

            self.comm.sendrecv = twice

    result = run_with(enter(Twice, formulas.ZERO1))
    assert failing(result) == ["traffic"]
    assert "rank 0: step 1: reduce-scatter: sent 304 B, formula 152 B" in says(result, "traffic")


def test_bytes_beside_the_collectives_fail_traffic(enter):
    class Chatty(ZeRO1):
        key = "chatty"

        def update(self, scale):
            super().update(scale)
            buffer = np.zeros(4, np.uint8)
            self.comm.sendrecv(buffer, (self.comm.rank + 1) % 3, buffer.copy(), (self.comm.rank - 1) % 3)

    result = run_with(enter(Chatty, formulas.ZERO1))
    assert failing(result) == ["traffic"]
    assert "other: sent 4 B, formula 0 B" in says(result, "traffic")


def test_half_precision_on_the_wire_is_not_sold_as_float32(enter):
    class Half(ZeRO3):
        key = "half"

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self._gather_dtype = np.dtype(np.float16)

    result = run_with(enter(Half, formulas.ZERO3))
    # No bit is lost: the parameters are float16. Only the bytes tell.
    assert failing(result) == ["traffic"]


def test_zero2_that_keeps_full_gradients_until_the_end_fails_memory(enter):
    class Keeping(ZeRO2):
        key = "keeping"

        def grad_ready(self, u):
            pass

        def backward_done(self, units):
            for u in (1, 0) if units == [0] else ():
                self.reduce_scatter(u)

    result = run_with(enter(Keeping, formulas.ZERO2))
    assert failing(result) == ["memory"]
    assert "unit gradient: peak 232 B, one unit at a time takes 160 B" in says(result, "memory")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("scratch", "scratch: peak 232 B of a kind that no formula knows"),
        ("params", "params: held 272 B within a step, formula 40 B"),
    ],
)
def test_whole_parameters_within_a_step_fail_memory_under_any_name(enter, kind, words):
    class Whole(ZeRO3):
        key = "whole"

        def update(self, scale):
            whole = self.ledger.empty(kind, self.model.n_params, np.dtype(np.float32))
            super().update(scale)
            del whole

    result = run_with(enter(Whole, formulas.ZERO3))
    assert failing(result) == ["memory"]
    assert words in says(result, "memory")


def test_a_16_bit_shard_that_is_stale_fails_learning(enter):
    class Stale(ZeRO3):
        key = "stale3"

        def update(self, scale):
            if self.steps_done < 5:
                super().update(scale)
                return
            kept = [p.copy() for p in self.params]
            super().update(scale)
            for p, old in zip(self.params, kept, strict=True):
                p[...] = old

    result = run_with(enter(Stale, formulas.ZERO3))
    # The last step's master is right, and no forward pass follows: only the shard itself tells.
    assert failing(result) == ["learning"]
    assert "ZeRO-3 parts from data parallel in step 5" in says(result, "learning")


def test_bands_of_another_size_fail_memory(enter):
    class Greedy(ZeRO3):
        key = "greedy"
        sharded = ("params", "optimizer")

    result = run_with(enter(Greedy, formulas.ZERO3))
    assert "memory" in failing(result)
    assert "grads: holds 116 B, formula 40 B" in says(result, "memory")


def test_the_reference_is_alone_in_seeing_a_fault_all_schemes_share():
    class Doubling(FaultyRing):
        def reduce_scatter(self, u, x):
            own = super().reduce_scatter(u, x)
            own[:1] *= 3
            return own

    result = run_with(model=M, reducer=Doubling)
    assert failing(result) == ["reference"]
