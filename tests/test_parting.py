"""Each class of cause is found where it is made, and not where something only looks like it.

Hand-made cases alter what a replay has; the last part makes mistakes in training, under every scheme.
"""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from helpers import named, run_with
from models import TinyUnits

from zero_mpi import parting
from zero_mpi.comm import SharedMistake
from zero_mpi.data import SeedStream
from zero_mpi.injection import FAULTS, Fault
from zero_mpi.model import MLP
from zero_mpi.optim import Adam
from zero_mpi.precision import dtype_of
from zero_mpi.reference import Reference
from zero_mpi.training import LossScale, Training

MODEL = MLP((9, 8, 5))  # Units of 80 and 45 elements: 3 and 4 do not divide both.
STEPS = 3


class Case:
    """A replay of a few steps, and what ranks would hold that did the same."""

    def __init__(self, size=3, precision="fp32", accumulate=1, every="step", reduce="float32", **training):
        self.size, self.accumulate, self.every = size, accumulate, every
        self.precision = named(precision, reduce)
        self.reference = Reference(
            MODEL, size, self.precision, Adam(), 0, Training(accumulate, every, **training), every
        )
        batches = SeedStream(7, 4, 9, 5, accumulate).global_batches(size)
        for self.batches in itertools.islice(batches, STEPS):
            self.reference.step(self.batches)

    def seen(self, **changes):
        r = self.reference
        stored = dtype_of(self.precision.params)
        theta = r.split(r.theta)
        states = {slot: r.split(array) for slot, array in r.state.items()}
        right = parting.Observed(
            gradients={u: mean.copy() for u, mean in r.means.items()},
            theta=[unit.copy() for unit in theta],
            stored=[unit.astype(stored).astype(np.float32) for unit in theta],
            state=[{slot: states[slot][u].copy() for slot in states} for u in range(len(theta))],
            replicas=[[unit.astype(stored) for unit in theta] for _ in range(self.size)],
            norms=[r.norm] * self.size,
            other_data=[],
        )
        return right._replace(**changes)

    def find(self, seen):
        return parting.find(STEPS, seen, self.reference)

    def with_gradient(self, gradient, u=1):
        """Return what is found if the ranks have this gradient of unit `u`."""
        seen = self.seen()
        seen.gradients[u] = np.ascontiguousarray(gradient, np.float32)
        return self.find(seen)

    def blocks(self, unit):
        return np.array_split(unit, self.size)

    def mean(self, change=lambda k, rank, g: g, u=1, order=None, terms=None, hop=lambda x: x):
        """Return the mean gradient of unit `u` by loops of our own, each local gradient changed first."""
        grads = dtype_of(self.precision.grads)
        reduce = dtype_of(self.precision.reduce)

        def local(k, rank):
            return np.asarray(change(k, rank, self.reference.locals[k][rank][u])).astype(grads)

        def ring(gradients):
            out = []
            for b in range(self.size):
                ranks = order(b) if order else [(b + 1 + i) % self.size for i in range(self.size)]
                parts = [self.blocks(gradients[rank])[b].astype(reduce) for rank in ranks]
                total = parts[0]
                for part in parts[1:]:
                    total = hop(total) + part
                out.append(total)
            return np.concatenate(out)

        turns = range(self.accumulate)
        if self.accumulate == 1 or self.every == "step":
            kept = []
            for rank in range(self.size):
                total = local(0, rank)
                for k in turns[1:]:
                    total = (total.astype(np.float32) + local(k, rank).astype(np.float32)).astype(grads)
                kept.append(total)
            total = ring(kept)
        else:
            total = ring([local(0, rank) for rank in range(self.size)]).astype(grads)
            for k in turns[1:]:
                more = ring([local(k, rank) for rank in range(self.size)])
                total = (total.astype(np.float32) + more.astype(np.float32)).astype(grads)
        wide = np.float64 if total.dtype == np.float64 else np.float32
        mean = (total.astype(wide) / wide(terms or self.size * self.accumulate)).astype(total.dtype)
        return mean.astype(grads).astype(np.float32)


EVERY_CASE = [
    {"size": size, "precision": precision, "accumulate": accumulate, "every": every}
    for size in (3, 4)
    for precision in ("fp32", "mixed")
    for accumulate, every in ((1, "step"), (2, "step"), (2, "micro-batch"))
]


@pytest.fixture(params=EVERY_CASE, ids=lambda options: "-".join(map(str, options.values())))
def case(request):
    return Case(**request.param)


@pytest.fixture(params=[3, 4])
def fp32(request):
    return Case(request.param)


def flipped(x, place, steps=1):
    """Return a copy of float32 `x` whose element at `place` is `steps` bits higher."""
    out = x.copy()
    out.view(np.int32)[place] += steps
    return out


# Where it parts.


def test_nothing_parts_where_nothing_differs(case):
    assert case.find(case.seen()) is None
    for u in (0, 1):
        assert case.mean(u=u).tobytes() == case.reference.means[u].tobytes()


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("u, place, tensor, index", [(0, 77, "bias", (5,)), (1, 13, "weight", (2, 3))])
def test_one_element_is_found_with_its_place_its_owner_and_its_bits(size, u, place, tensor, index):
    case = Case(size)
    right = case.reference.means[u]
    found = case.with_gradient(flipped(right, place, 3), u)
    owner = next(r for r, part in enumerate(case.blocks(np.arange(right.size))) if place in part)
    assert found[:6] == (STEPS, "gradient", u, tensor, index, owner)
    assert found.dtype == "float32" and found.ulp == 3
    assert found.expected == float(right[place]) and found.observed != found.expected
    bits = int(right.view(np.uint32)[place])
    assert (found.observed_bits, found.expected_bits) == (f"0x{bits + 3:08x}", f"0x{bits:08x}")
    assert (found.differing, found.numel) == (1, right.size)
    assert found.cause == "unknown"


def test_bits_and_steps_are_those_of_the_stored_dtype():
    case = Case(3, "mixed")
    right = case.reference.means[0]
    stored = right.astype(np.float16)
    place = int(np.argmax(stored > 0))
    other = stored.copy()
    other.view(np.int16)[place] += 5
    found = case.with_gradient(other.astype(np.float32), 0)
    bits = int(stored.view(np.uint16)[place])
    assert found.dtype == "float16" and found.ulp == 5
    assert (found.observed_bits, found.expected_bits) == (f"0x{bits + 5:04x}", f"0x{bits:04x}")


def test_the_first_unit_comes_first_and_gradients_before_parameters(case):
    seen = case.seen()
    for u in (1, 0):
        seen.gradients[u][0] += 1
        seen.theta[u][0] += 1
    found = case.find(seen)
    assert (found.phase, found.unit, found.place) == ("gradient", 0, (0, 0))
    seen = case.seen()
    seen.theta[1][44] += 1
    seen.replicas[0][0][0] += 1
    found = case.find(seen)
    assert (found.phase, found.unit, found.tensor, found.place) == ("parameters", 1, "bias", (4,))
    assert found.rank == case.size - 1 and found.dtype == "float32"


def test_a_replica_names_the_rank_that_holds_it(case):
    seen = case.seen()
    seen.replicas[2][1][0] += 1
    found = case.find(seen)
    assert (found.phase, found.unit, found.rank, found.cause) == ("replica", 1, 2, "unknown")
    assert found.dtype == case.precision.params


@pytest.mark.parametrize(
    "a, b, dtype, steps",
    [
        (1.0, 1.0, "float32", 0),
        (0.0, -0.0, "float32", 0),
        (1.0, np.nextafter(np.float32(1), np.float32(2)), "float32", 1),
        (1e-45, -1e-45, "float32", 2),
        (1.0, 2.0, "float32", 2**23),
        (1.0, 2.0, "float16", 2**10),
        (-1.0, -2.0, "bfloat16", 2**7),
        (-(2.0**-24), 2.0**-24, "float16", 2),
    ],
)
def test_ulps_are_steps_from_number_to_number(a, b, dtype, steps):
    x, y = np.array([a, b], np.float32), np.array([b, a], np.float32)
    assert parting.ulp_distances(x, y, dtype).tolist() == [steps, steps]


# Of the gradient.


def summed(case, order):
    return case.with_gradient(case.mean(order=order))


ORDERS = {
    "reversed": lambda case: lambda b: [(b - 1 - i) % case.size for i in range(case.size)],
    "in rank order": lambda case: lambda b: range(case.size),
    "rotated": lambda case: lambda b: [(b + 2 + i) % case.size for i in range(case.size)],
}


# Of three ranks the reversed ring gives the same bits: a + b = b + a.
@pytest.mark.parametrize("size, name", [(n, name) for n in (3, 4) for name in ORDERS][1:])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("wire", [("fp32", "float32"), ("mixed", "float16")])
def test_another_order_of_ranks_is_summation_order(size, wire, accumulate, name):
    case = Case(size, wire[0], accumulate, reduce=wire[1])
    found = summed(case, ORDERS[name](case))
    assert (found.phase, found.cause) == ("gradient", "summation order")


def test_some_orders_give_the_same_bits():
    for size, name in ((2, "rotated"), (2, "in rank order"), (3, "reversed")):
        case = Case(size)
        assert summed(case, ORDERS[name](case)) is None


def test_a_flipped_last_bit_is_no_order_and_no_wire(case):
    right = case.reference.means[1]
    for place in range(0, right.size, 3):
        for steps in (-1, 1):
            other = flipped(right, place, steps)
            if case.precision.grads == "float16":
                stored = right.astype(np.float16)
                stored.view(np.int16)[place] += steps
                other = stored.astype(np.float32)
            found = case.with_gradient(other)
            assert found.cause == "unknown" and "within rounding" in found.why, (place, steps)


def test_another_order_in_one_block_and_a_flip_in_another_is_no_order(fp32):
    other = fp32.mean(order=ORDERS["rotated"](fp32))
    found = fp32.with_gradient(flipped(other, 44))
    assert found.cause == "unknown"


@pytest.mark.parametrize("every, other", [("step", "micro-batch"), ("micro-batch", "step")])
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("size", [3, 4])
def test_micro_batches_added_at_another_time_are_order_of_accumulation(size, precision, every, other):
    case = Case(size, precision, 2, every)
    case.every = other
    gradient = case.mean()
    found = case.with_gradient(gradient)
    assert found.cause == "order of accumulation" and other in found.why


def test_the_last_micro_batch_first_is_no_order_of_accumulation():
    case = Case(3, "fp32", 3)
    turns = list(case.reference.locals)
    other = case.mean(lambda k, rank, g: turns[2 - k][rank][1])
    found = case.with_gradient(other)
    assert found.cause == "unknown" and "within rounding" in found.why


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_partial_sums_rounded_on_their_way_are_dtype_on_the_wire(fp32, wire, accumulate):
    case = Case(fp32.size, accumulate=accumulate)
    kind = dtype_of(wire)
    other = case.mean(hop=lambda x: x.astype(kind).astype(np.float32))
    found = case.with_gradient(other)
    assert found.cause == "dtype on the wire" and wire in found.why
    # Half of them, as a mistake may have it.
    half = np.where(np.arange(45) % 15 < 7, other, case.reference.means[1])
    assert case.with_gradient(half).cause == "dtype on the wire"


@pytest.mark.parametrize("reduce", ["float16", "bfloat16", "float64"])
def test_a_sum_in_another_dtype_is_dtype_on_the_wire(fp32, reduce):
    other = Case(fp32.size)
    other.precision = dataclasses.replace(other.precision, reduce=reduce)
    found = fp32.with_gradient(other.mean())
    assert found.cause == "dtype on the wire" and reduce in found.why


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_a_gradient_rounded_after_the_sum_is_no_wire(fp32, wire):
    other = fp32.reference.means[1].astype(dtype_of(wire)).astype(np.float32)
    found = fp32.with_gradient(other)
    assert found.cause == "unknown"


def test_a_few_elements_of_a_wires_rounding_are_no_wire():
    case = Case(4, "mixed")
    right = case.reference.means[1]
    sent = case.mean(hop=lambda x: x.astype(np.float16).astype(np.float32))
    apart = np.flatnonzero(sent != right)
    assert apart.size > 8
    few, enough = right.copy(), right.copy()
    few[apart[:3]], enough[apart[:8]] = sent[apart[:3]], sent[apart[:8]]
    assert case.with_gradient(few).cause == "unknown"
    assert case.with_gradient(enough).cause == "dtype on the wire"


@pytest.mark.parametrize("factor", [1.5, 0.25, 2.0, -1.0, 1.02])
def test_a_constant_factor_on_all_terms_is_divisor_or_scale(case, factor):
    for other in (
        case.mean(lambda k, rank, g: g.astype(np.float32) * np.float32(factor)),
        case.reference.means[1] * np.float32(factor),
    ):
        stored = other.astype(dtype_of(case.precision.grads)).astype(np.float32)
        found = case.with_gradient(stored)
        assert found.cause == "divisor or scale"
        assert float(found.why.split()[5].rstrip(",")) == pytest.approx(factor, rel=2e-3)


def test_a_factor_in_one_block_alone_is_divisor_or_scale(case):
    other = case.reference.means[1].copy()
    case.blocks(other)[1][...] *= 0.5
    found = case.with_gradient(other)
    assert (found.cause, found.rank) == ("divisor or scale", 1)


def test_a_factor_just_beyond_rounding_is_a_factor_and_within_it_is_not(fp32):
    for factor, cause in ((1 + 1e-4, "divisor or scale"), (1 + 2e-7, "unknown")):
        assert fp32.with_gradient(fp32.reference.means[1] * np.float32(factor)).cause == cause


@pytest.mark.parametrize("factor", [1.5, 0.5, 0.05, 1.9, 3.0, -1.0, 1.1])
def test_a_factor_on_one_term_is_no_class(case, factor):
    def one(k, rank, g):
        return g.astype(np.float32) * np.float32(factor) if (k, rank) == (0, 1) else g

    assert case.with_gradient(case.mean(one)).cause == "unknown"


def test_two_factors_within_a_block_are_no_scale(case):
    other = case.reference.means[1].copy()
    other[:7] *= np.float32(1.5)
    other[7:] *= np.float32(1.25)
    assert case.with_gradient(other).cause == "unknown"


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_left_out_is_a_missing_contribution(case, lost):
    other = case.mean(lambda k, rank, g: g * 0 if rank == lost else g)
    found = case.with_gradient(other)
    assert found.cause == "missing contribution"
    ranks = {int(word.strip(";,")) for word, at in _after(found.why, "rank")}
    assert ranks == {lost}
    # The mean over those that are there.
    left = (case.size - 1) * case.accumulate
    found = case.with_gradient(case.mean(lambda k, rank, g: g * 0 if rank == lost else g, terms=left))
    assert found.cause == "missing contribution" and f"divided by {left}" in found.why


def _after(words, name):
    """Yield the word that follows each `name`."""
    parts = words.split()
    return [(parts[i + 1], i) for i, part in enumerate(parts[:-1]) if part == name]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("every", ["step", "micro-batch"])
def test_a_micro_batch_left_out_is_a_missing_contribution(size, precision, every):
    case = Case(size, precision, 2, every)
    found = case.with_gradient(case.mean(lambda k, rank, g: g * 0 if k == 0 else g))
    assert found.cause == "missing contribution"
    assert {at for at, _ in _after(found.why, "micro-batch")} == {"0;", "0"}


def test_a_rank_left_out_of_one_block_is_a_missing_contribution(case):
    without, other = case.mean(lambda k, rank, g: g * 0 if rank == 2 else g), case.mean()
    case.blocks(other)[1][...] = case.blocks(without)[1]
    found = case.with_gradient(other)
    assert (found.cause, found.rank) == ("missing contribution", 1)


def test_ranks_that_keep_their_own_gradients_have_missing_contributions(case):
    # Another rank is left out in each block: the first tells.
    means = [case.mean(lambda k, rank, g, b=b: g if rank == b else g * 0) for b in range(case.size)]
    other = np.concatenate([case.blocks(mean)[b] for b, mean in enumerate(means)])
    found = case.with_gradient(other)
    assert found.cause == "missing contribution" and "rank 0" not in found.why


def test_a_rank_left_out_while_the_others_count_more_is_not_missing(case):
    other = case.mean(lambda k, rank, g: g.astype(np.float32) * (0 if rank == 1 else 1.2))
    assert case.with_gradient(other).cause == "unknown"


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rank_counted_twice_is_a_doubled_contribution(fp32, precision, accumulate):
    case = Case(fp32.size, precision, accumulate)
    found = case.with_gradient(case.mean(lambda k, rank, g: g * 2 if rank == 1 else g))
    assert found.cause == "doubled contribution"
    assert {at for at, _ in _after(found.why, "rank")} <= {"1", "1,", "1;"}


def test_a_gradient_of_the_step_before_is_stale(case):
    found = case.with_gradient(case.reference.means_before[1])
    assert found.cause == "stale"
    # On one rank.
    other = case.reference.means[1].copy()
    case.blocks(other)[2][...] = case.blocks(case.reference.means_before[1])[2]
    found = case.with_gradient(other)
    assert (found.cause, found.rank) == ("stale", 2)


def test_some_elements_of_the_step_before_are_not_stale(case):
    right, before = case.reference.means[1], case.reference.means_before[1]
    other = right.copy()
    other[::2] = before[::2]
    assert case.with_gradient(other).cause == "unknown"
    # All of it but for one element that is neither.
    other = before.copy()
    other[20] = 0.5
    assert case.with_gradient(other).cause == "unknown"


def test_zeros_are_not_stale_where_the_step_before_had_zeros_too(case):
    case.reference.means_before[1][...] = 0
    assert case.with_gradient(np.zeros(45)).cause == "missing contribution"


def test_nothing_is_stale_in_the_first_step():
    case = Case(3)
    first = Reference(MODEL, 3, case.precision, Adam(), 0)
    first.step(next(SeedStream(7, 4, 9, 5).global_batches(3)))
    case.reference = first
    seen = case.seen()
    seen.gradients[1][...] = 0
    assert parting.find(1, seen, first).cause == "missing contribution"


def displaced(case, unit, d):
    """Return `unit` with the d-th next block in the place of each."""
    blocks = case.blocks(unit)
    return np.concatenate([np.resize(blocks[(b + d) % case.size], len(x)) for b, x in enumerate(blocks)])


@pytest.mark.parametrize("shift", [-1, 1])
def test_blocks_off_by_one_are_a_wrong_block(case, shift):
    other = case.mean(lambda k, rank, g: np.roll(g, shift))
    assert case.with_gradient(other).cause == "wrong block"
    other = np.roll(case.reference.means[1], shift)
    assert case.with_gradient(other).cause == "wrong block"


def test_the_block_of_another_rank_is_a_wrong_block(case):
    for d in range(1, case.size):
        for other in (
            displaced(case, case.reference.means[1], d),
            # Elements of the other block, added in the order of this one.
            case.mean(lambda k, rank, g, d=d: displaced(case, g, d)),
        ):
            found = case.with_gradient(other)
            assert found.cause == "wrong block" and f"equals block {d}" in found.why


def test_two_blocks_that_changed_places_are_a_wrong_block(case):
    other, right = case.reference.means[1].copy(), case.blocks(case.reference.means[1])
    common = min(len(right[0]), len(right[1]))
    case.blocks(other)[0][:common], case.blocks(other)[1][:common] = right[1][:common], right[0][:common]
    assert case.with_gradient(other).cause == "wrong block"


def test_blocks_that_changed_places_in_part_are_no_wrong_block(case):
    other, right = case.reference.means[1].copy(), case.blocks(case.reference.means[1])
    case.blocks(other)[0][:6], case.blocks(other)[1][:6] = right[1][:6], right[0][:6]
    assert case.with_gradient(other).cause == "unknown"


def test_a_move_in_one_block_and_noise_in_another_is_no_wrong_block(case):
    other = np.roll(case.reference.means[1], 1)
    case.blocks(other)[2][...] += 1
    assert case.with_gradient(other).cause == "unknown"


@pytest.mark.parametrize("size", [3, 4])
def test_blocks_of_equal_numbers_do_not_tell_a_move(size):
    # A unit of one scale, then equal elements: without the scale, the first block looks like any other.
    model = TinyUnits((41,))
    reference = Reference(model, size, named("fp32"), Adam(), 0)
    for batch in itertools.islice(SeedStream(7, 4, 4, 4).global_batches(size), 2):
        reference.step(batch)
    case = Case(size)
    case.reference = reference
    seen = case.seen()
    right = reference.means[0]
    assert len(np.unique(case.blocks(right)[1])) == 1
    seen.gradients[0][0] = right[1]
    assert case.blocks(seen.gradients[0])[0][:9].tobytes() == case.blocks(right)[1][:9].tobytes()
    assert parting.find(2, seen, reference).cause == "unknown"


def test_a_nan_where_a_number_is_due_is_non_finite(case):
    for value in (np.nan, np.inf, -np.inf):
        other = case.reference.means[1].copy()
        other[[3, 44]] = value
        found = case.with_gradient(other)
        assert found.cause == "non-finite" and found.why.startswith("2 elements are")
        assert (found.differing, found.place) == (2, (0, 3))


def test_a_nan_that_the_reference_has_too_is_no_parting(case):
    case.reference.means[1][3] = np.nan
    other = case.reference.means[1].copy()
    # Any NaN is any: which one an addition gives is the processor's choice.
    other.view(np.uint32)[3] ^= 1 << 31
    assert case.with_gradient(other) is None
    other[4] += 1
    found = case.with_gradient(other)
    assert (found.cause, found.place) == ("unknown", (0, 4))


def test_a_rank_with_other_rows_is_different_data(case):
    other = case.mean(lambda k, rank, g: g[::-1] if rank == 1 else g)
    seen = case.seen(other_data=[1])
    seen.gradients[1] = other
    found = case.find(seen)
    assert found.cause == "different data" and "rank 1 " in found.why
    # The same numbers without that evidence.
    assert case.with_gradient(other).cause == "unknown"


# Of the parameters.


def with_theta(case, theta, u=1):
    seen = case.seen()
    seen.theta[u] = np.ascontiguousarray(theta, np.float32)
    return case.find(seen)


def test_parameters_that_were_not_updated_are_stale(case):
    before = case.reference.split(case.reference.before[0])[1]
    found = with_theta(case, before)
    assert (found.phase, found.cause) == ("parameters", "stale")
    other = case.reference.split(case.reference.theta)[1].copy()
    case.blocks(other)[1][...] = case.blocks(before)[1]
    found = with_theta(case, other)
    assert (found.phase, found.cause, found.rank) == ("parameters", "stale", 1)


def test_parameters_half_way_or_stale_here_and_there_are_not_stale(case):
    now, before = (case.reference.split(x)[1] for x in (case.reference.theta, case.reference.before[0]))
    assert with_theta(case, (now + before) / 2).cause == "unknown"
    other = now.copy()
    other[::2] = before[::2]
    assert with_theta(case, other).cause == "unknown"


@pytest.mark.parametrize("d", [1, 2])
def test_an_update_with_another_blocks_gradient_is_a_wrong_block(case, d):
    moved = displaced(case, case.reference.means[1], d)
    theta = case.reference.updated({**case.reference.means, 1: moved}, 1.0)
    found = with_theta(case, case.reference.split(theta)[1])
    assert (found.phase, found.cause) == ("parameters", "wrong block")
    assert f"an update of block 0 with block {d}" in found.why


def test_an_update_with_a_gradient_of_no_block_is_unknown(case):
    theta = case.reference.updated({**case.reference.means, 1: case.reference.means[1][::-1]}, 1.0)
    assert with_theta(case, case.reference.split(theta)[1]).cause == "unknown"


@pytest.mark.parametrize("size", [3, 4])
def test_an_update_scaled_by_ranks_norms_or_loss_scales_is_divisor_or_scale(size):
    clipped, scaled = Case(size, clip_norm=0.01), Case(size, "mixed", loss_scale=LossScale(512.0, False))
    norm = clipped.reference.norm
    for case, right, wrong, words in (
        (clipped, 0.01 / norm, 1.0, "norm / clip norm"),
        (clipped, 0.01 / norm, 0.01 / norm / size, "1 / (N)"),
        (scaled, 1 / 512, 1.0, "the loss scale"),
    ):
        r = case.reference
        assert r.updated(r.means, right).tobytes() == r.theta.tobytes()
        found = with_theta(case, r.split(r.updated(r.means, wrong))[0], 0)
        assert found.cause == "divisor or scale" and words in found.why
        found = with_theta(case, r.split(r.updated(r.means, 1.7 * right))[0], 0)
        assert found.cause == "unknown"


def test_a_rank_that_clips_by_its_own_norm_is_divisor_or_scale(fp32):
    case = Case(fp32.size, clip_norm=0.01)
    r = case.reference
    norms = [r.norm] * case.size
    norms[1] = r.norm / 2.7
    theta = r.split(r.theta)[0].copy()
    own = r.split(r.updated(r.means, 0.01 / norms[1]))[0]
    case.blocks(theta)[1][...] = case.blocks(own)[1]
    for said, cause in ((norms, "divisor or scale"), ([r.norm] * case.size, "unknown")):
        seen = case.seen(norms=said)
        seen.theta[0] = theta
        found = case.find(seen)
        assert (found.cause, found.rank) == (cause, 1)


# Of copies.


def test_a_copy_from_before_the_update_is_stale_and_a_changed_one_is_not(case):
    stored = dtype_of(case.precision.params)
    before = case.reference.split(case.reference.before[0])[0].astype(stored)
    seen = case.seen()
    # Rank 1 holds its own block right.
    own = case.blocks(seen.replicas[1][0])[1].copy()
    seen.replicas[1][0][...] = before
    case.blocks(seen.replicas[1][0])[1][...] = own
    found = case.find(seen)
    assert (found.phase, found.unit, found.rank, found.cause) == ("replica", 0, 1, "stale")
    seen.replicas[1][0][0] = 2
    assert case.find(seen).cause == "unknown"


def test_a_16_bit_shard_that_its_owner_forgot_to_round_anew_is_stale():
    case = Case(3, "mixed")
    before = case.reference.split(case.reference.before[0])[1].astype(np.float16).astype(np.float32)
    seen = case.seen()
    case.blocks(seen.stored[1])[2][...] = case.blocks(before)[2]
    found = case.find(seen)
    assert (found.phase, found.dtype, found.rank, found.cause) == ("parameters", "float16", 2, "stale")


@pytest.mark.parametrize("slot", ["m", "v"])
def test_optimizer_state_that_parts_alone_is_found(case, slot):
    before = case.reference.split(case.reference.before[1][slot])[1]
    seen = case.seen()
    seen.state[1][slot] = before.copy()
    found = case.find(seen)
    assert (found.phase, found.unit, found.cause) == ("optimizer", 1, "stale") and slot in found.why
    seen.state[1][slot][7] += 1
    assert case.find(seen).cause == "unknown"


# In training: the same, where ranks do it.


def trained(make, schemes, size, on="scheme", precision="fp32", accumulate=1, every=None, **options):
    """Train with a mistake on purpose; return what was found of each scheme that makes it."""
    fault = Fault("of a test", "", ("dp", *schemes), "", "", {}, **{on: make})
    model = MLP((9, 8, 5))
    result = run_with(
        size=size,
        model=model,
        data=SeedStream(7, 4, 9, 5, accumulate),
        precision=precision,
        training=Training(accumulate, every),
        steps=3,
        fault=fault,
        faulty=tuple(schemes),
        **options,
    )
    rows = result["learning"]["schemes"]
    return {key: rows[key]["parting"] for key in ("dp", "zero1", "zero2", "zero3")}


ALL = ("dp", "zero1", "zero2", "zero3")


def before_reduction(change):
    def make(scheme):
        unreduced = scheme._unreduced

        def changed(u):
            x = unreduced(u)
            if scheme.steps_begun == 2 and u == 1:
                change(scheme.comm.rank, x)
            return x

        scheme._unreduced = changed

    return make


def silence(rank, x):
    if rank == 2:
        x[...] = 0


def halve(rank, x):
    if rank == 2:
        x *= np.float32(0.5)


def double(rank, x):
    if rank == 1:
        x *= 2


def enlarge(rank, x):
    x *= np.float32(1.5)


IN_TRAINING = {
    "a rank left out": (silence, "missing contribution"),
    "a rank halved": (halve, "unknown"),
    "a rank doubled": (double, "doubled contribution"),
    "all enlarged": (enlarge, "divisor or scale"),
}


@pytest.mark.parametrize("name", IN_TRAINING)
@pytest.mark.parametrize("precision, accumulate", [("fp32", 1), ("mixed", 1), ("fp32", 2), ("mixed", 2)])
@pytest.mark.parametrize("size", [3, 4])
def test_every_scheme_that_makes_a_mistake_is_found_out(size, precision, accumulate, name):
    change, cause = IN_TRAINING[name]
    every = "step" if accumulate == 2 else None
    found = trained(before_reduction(change), ALL, size, "scheme", precision, accumulate, every)
    assert found["dp"]["cause"] == cause
    assert found["dp"]["step"] == 2 and found["dp"]["unit"] == 1
    assert all(row == found["dp"] for row in found.values())


def test_only_the_scheme_that_makes_it_is_named():
    found = trained(before_reduction(silence), ("zero2",), 3)
    assert found["zero2"]["cause"] == "missing contribution"
    assert [found[key] for key in ("dp", "zero1", "zero3")] == [None] * 3


class Rows:
    """Data of which rank 1 gets its rows changed."""

    def __init__(self, data, change):
        self.data, self.change = data, change

    def fingerprint(self):
        return self.data.fingerprint()

    def global_batches(self, size):
        for batches in self.data.global_batches(size):
            batches = list(batches)
            batches[1] = [(self.change(x), self.change(y)) for x, y in batches[1]]
            yield batches


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_other_rows_are_different_data_and_the_same_in_another_order_are_not(size, accumulate):
    def of_rank_1(change):
        return lambda data, rank: Rows(data, change) if rank == 1 else data

    found = trained(of_rank_1(lambda rows: rows * 2), ALL, size, "data", "fp32", accumulate)
    assert {row["cause"] for row in found.values()} == {"different data"}
    found = trained(of_rank_1(lambda rows: rows[::-1].copy()), ALL, size, "data", "fp32", accumulate)
    assert {row["cause"] for row in found.values()} == {"unknown"}
    assert all("within rounding" in row["why"] for row in found.values())


def test_other_initial_weights_are_named_at_set_up():
    with pytest.raises(SharedMistake, match="initial weights: expected the same on every rank, got .* on"):
        trained(FAULTS["rank-dependent-weights"].model, ALL, 3, "model")


def test_a_stale_16_bit_shard_of_zero3_is_found_where_its_master_is_right():
    def make(scheme):
        update = scheme.update

        def forgetful(scale):
            kept = [p.copy() for p in scheme.params]
            update(scale)
            if scheme.steps_begun == 2 and scheme.comm.rank == 1:
                scheme.params[0][...] = kept[0]

        scheme.update = forgetful

    found = trained(make, ("zero3",), 3, precision="mixed")["zero3"]
    assert [found[key] for key in ("step", "phase", "unit", "rank", "cause")] == [
        2,
        "parameters",
        0,
        1,
        "stale",
    ]


def test_every_class_is_provoked_above():
    text = Path(__file__).read_text()
    assert all(f'"{name}"' in text for name in parting.CLASSES)


def test_terms_that_are_multiples_of_each_other_name_no_cause():
    """A sum without one is then the whole times a number, which is what any other factor is, too."""
    columns = np.outer([1.0, -2.0, 0.5], [1.0, 2.0, 4.0])
    named, rounding = [(0, 0), (0, 1), (0, 2)], (1e-7, 0.0)

    def found(target):
        return [cause for cause, _ in parting._explained(columns, target, named, rounding)]

    assert found(columns[:, 1:].sum(axis=1)) == found(columns[:, 0] * 3) == ["unknown"]
    assert found(columns.sum(axis=1) + columns[:, 2]) == ["unknown"]
    assert found(columns.sum(axis=1) * 0.37) == ["divisor or scale"]
    other = np.random.default_rng(1).standard_normal((3, 3))
    assert [c for c, _ in parting._explained(other, other[:, 1:].sum(axis=1), named, rounding)] == [
        "missing contribution"
    ]
