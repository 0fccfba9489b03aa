"""Formulas: the numbers of the paper and of the small cases, and the sums that must hold for every size."""

from fractions import Fraction

import pytest

from zero_mpi import formulas
from zero_mpi.formulas import DP, ZERO1, ZERO2, ZERO3, Itemsizes, Workload

MIXED = Itemsizes(params=2, grads=2, optimizer=12, reduce=4, gather=4)
FP32 = Itemsizes(params=4, grads=4, optimizer=8, reduce=4, gather=4)
HALF_WIRE = Itemsizes(params=2, grads=2, optimizer=12, reduce=2, gather=2)
CLAIMS = [DP, ZERO1, ZERO2, ZERO3]
M = (40, 18)


def on(size, items=MIXED, units=M, **options):
    """Return a workload of the small MLP."""
    return Workload(units, items, size, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 32])
def test_bytes_per_param_are_the_papers(size):
    expected = [16, 4 + Fraction(12, size), 2 + Fraction(14, size), Fraction(16, size)]
    assert [formulas.bytes_per_param(claim, on(size)) for claim in CLAIMS] == expected


def test_closed_forms_read_as_in_the_paper():
    assert [formulas.bytes_per_param_text(c, on(3)) for c in CLAIMS] == [
        "16",
        "4 + 12/N",
        "2 + 14/N",
        "16/N",
    ]
    assert [formulas.bytes_per_param_text(c, on(3, FP32)) for c in CLAIMS] == [
        "16",
        "8 + 8/N",
        "4 + 12/N",
        "16/N",
    ]


def test_case_memory_of_the_small_mlp():
    def held(claim):
        return [sum(formulas.resident_bytes(claim, on(3), r).values()) for r in range(3)]

    assert [held(claim) for claim in CLAIMS] == [
        [928, 928, 928],
        [472, 460, 460],
        [396, 382, 382],
        [320, 304, 304],
    ]


def test_case_traffic_of_the_small_mlp():
    totals = [formulas.sent_bytes_all_ranks(claim, on(3, HALF_WIRE)) for claim in CLAIMS]
    assert totals == [464, 464, 464, 696]


@pytest.mark.parametrize("units", [M, (1,), (2, 3, 1), (8320, 16512, 8256)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 32])
@pytest.mark.parametrize("claim", CLAIMS)
def test_ranks_together_send_exactly_n_minus_one_vectors(claim, size, units):
    work = on(size, units=units)
    ranks = [formulas.sent_bytes(claim, work, r) for r in range(size)]
    total = sum(sum(sent.values()) for sent in ranks)
    collectives = 3 if claim is ZERO3 else 2
    assert total == formulas.sent_bytes_all_ranks(claim, work) == collectives * (size - 1) * sum(units) * 4
    assert Fraction(total, size * sum(units) * 4) == formulas.traffic_units(claim, work)
    held = [formulas.resident_bytes(claim, work, r) for r in range(size)]
    mean = Fraction(sum(sum(h.values()) for h in held), size * sum(units))
    assert mean == formulas.bytes_per_param(claim, work)


@pytest.mark.parametrize(
    "size, expected",
    [
        (2, ["1.0000", "1.5000"]),
        (4, ["1.5000", "2.2500"]),
        (8, ["1.7500", "2.6250"]),
        (16, ["1.8750", "2.8125"]),
        (32, ["1.9375", "2.9062"]),
    ],
)
def test_traffic_units_are_the_specs_table(size, expected):
    assert [f"{float(formulas.traffic_units(c, on(size))):.4f}" for c in (DP, ZERO3)] == expected
    assert formulas.traffic_units(ZERO1, on(size)) == formulas.traffic_units(ZERO2, on(size))
    assert formulas.traffic_units(DP, on(size)) < 2 and formulas.traffic_units(ZERO3, on(size)) < 3


def test_messages_are_n_minus_one_a_collective_unless_cut():
    assert formulas.sent_messages(ZERO3, on(3), 0, 2**30) == 3 * 2 * 2
    # Each collective in its own dtype: rank 1 of 3, 2 B gradients in blocks of 14, 13, 13 and 6, 6, 6 sends
    # 14 and 13, and 6 and 6 elements; 4 B parameters 14 and 13 (all but rank 2's), and 6 and 6.
    half = Itemsizes(params=2, grads=2, optimizer=12, reduce=2, gather=4)
    assert formulas.sent_messages(ZERO2, on(3, half), 1, 27) == (2 + 1 + 1 + 1) + (3 + 2 + 1 + 1)
    assert formulas.sent_messages(DP, on(3, half), 1, 27) == (2 + 1 + 1 + 1) * 2
    # Rank 0 of 3 at 20 B a message: reduce-scatter sends 13 + 13 of 40 and 6 + 6 of 18 elements of 4 B.
    assert formulas.sent_messages(ZERO2, on(3), 0, 20) == (3 + 3 + 2 + 2) + (3 + 3 + 2 + 2)


# ZeRO paper (arXiv 1910.02054 v3), Figure 1 and Table 1: GB a device, printed rounded or truncated.
@pytest.mark.parametrize(
    "n_params, size, printed, place",
    [
        (7.5e9, 64, [120, 31.4, 16.6, 1.88], [1, 0.1, 0.1, 0.01]),
        (7.5e9, 4, [120, 52.5, 41.3, 30], [1, 0.1, 0.1, 1]),
        (128e9, 64, [2048, 536, 284, 32], [1, 1, 1, 1]),
        (1e12, 1024, [16000, 4011, 2013, 15.6], [1, 1, 1, 0.1]),
    ],
)
def test_bytes_per_param_give_the_papers_table(n_params, size, printed, place):
    for claim, value, unit in zip(CLAIMS, printed, place, strict=True):
        predicted = float(formulas.bytes_per_param(claim, on(size))) * n_params / 1e9
        assert abs(predicted - value) < unit


@pytest.mark.parametrize("accumulate", [1, 2, 5])
@pytest.mark.parametrize(
    "every, expected",
    [
        (None, lambda k: [2, 2, k + 1, 3 * k]),
        ("micro-batch", lambda k: [2 * k, k + 1, k + 1, 3 * k]),
        ("step", lambda k: [2, 2, 2, 2 * k + 1]),
    ],
)
def test_micro_batches_cost_what_the_field_says(every, expected, accumulate):
    work = on(3, accumulate=accumulate, reduce_every=every)
    share = Fraction(2, 3)
    assert [formulas.traffic_units(c, work) / share for c in CLAIMS] == expected(accumulate)
    texts = [formulas.traffic_units_text(c, work) for c in CLAIMS]
    assert texts == [f"{vectors}(N-1)/N" for vectors in expected(accumulate)]


def test_gradients_reduced_once_a_step_are_whole_until_then():
    work = on(4, reduce_every="step")
    assert [formulas.bytes_per_param_text(c, work) for c in CLAIMS] == [
        "16",
        "4 + 12/N",
        "4 + 12/N",
        "2 + 14/N",
    ]
    held = formulas.resident_bytes(ZERO3, work, 0)
    assert held == {"params": 2 * 15, "grads": 2 * 58, "optimizer": 12 * 15}


def test_frozen_units_have_parameters_alone():
    work = on(3, frozen=(0,), accumulate=2)
    assert formulas.resident_bytes(ZERO2, work, 0) == {"params": 116, "grads": 2 * 6, "optimizer": 12 * 6}
    # Forward and backward gather both units of ZeRO-3; backward stops above unit 0, so that is gathered once.
    assert formulas.collectives(ZERO3, work, 0) == (0, 0, 2)
    assert formulas.collectives(ZERO3, work, 1) == (2, 0, 4)
    assert formulas.collectives(ZERO2, work, 0) == (0, 0, 0)
    assert formulas.collectives(DP, work, 1) == (1, 1, 0)


def test_a_skipped_step_gathers_no_parameters_after_an_update():
    assert formulas.collectives(ZERO1, on(3, updated=False), 0) == (1, 0, 0)
    assert formulas.collectives(ZERO3, on(3, updated=False), 0) == (1, 0, 2)


def test_halving_sends_as_little_as_the_ring_for_powers_of_two_and_a_block_more_for_each_odd_rank():
    # 40 elements over 6 ranks: blocks 7 7 7 7 6 6. Rank 1 hands over all; 0 gives away 4 and 5, then 2 and 3,
    # then block 1.
    assert formulas.halving_sent(40, 6, 1) == [40]
    assert formulas.halving_sent(40, 6, 0) == [12, 14, 7]
    assert formulas.halving_sent(40, 6, 4) == [28, 6]
    assert formulas.halving_sent(40, 1, 0) == []


@pytest.mark.parametrize("reducer", formulas.REDUCE_SCATTERS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 32])
@pytest.mark.parametrize("numel", [0, 1, 5, 40, 257])
def test_all_ranks_together_send_the_closed_form(reducer, size, numel):
    sent = sum(sum(formulas.REDUCE_SCATTERS[reducer](numel, size, rank)) for rank in range(size))
    assert sent == formulas._all_ranks(reducer, numel, size)
    if size in (1, 2, 4, 8, 16, 32) and reducer != "naive":
        assert sent == (size - 1) * numel


def test_a_number_in_a_formula_has_no_bare_point_and_is_never_nothing():
    said = [formulas._number(Fraction(*pair)) for pair in ((2, 1), (200000001, 10**8), (138, 13), (2, 10**6))]
    assert said == ["2", "2", "10.61538", "2e-06"]
