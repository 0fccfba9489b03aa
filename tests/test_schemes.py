"""The four schemes over threads: same bits as each other and as the oracle, bands and bytes to the byte."""

import numpy as np
import pytest
from helpers import WIRES, M, failing, run_with, says, settings
from models import Prepared, TinyUnits
from threadworld import run_ranks

from zero_mpi import checks, formulas
from zero_mpi.model import MLP
from zero_mpi.optim import SGD, Adam
from zero_mpi.precision import Precision
from zero_mpi.reducers import Naive, ReversedRing, Ring
from zero_mpi.run import run
from zero_mpi.schemes import DP, SCHEMES, Scheme, ZeRO1, ZeRO2, ZeRO3
from zero_mpi.schemes.base import NORM_PIECE
from zero_mpi.training import Training


@pytest.mark.parametrize("wire", WIRES, ids=" ".join)
@pytest.mark.parametrize("model", [M, TinyUnits()], ids=["mlp", "tiny"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_schemes_and_oracle_agree_to_the_bit_and_bytes_to_the_byte(size, model, wire):
    results = run_ranks(size, lambda comm: run(comm, settings(model, *wire), list(SCHEMES)))
    assert all(result == results[0] for result in results)
    assert [v["check"] for v in results[0]["verdicts"]] == ["learning", "reference", "memory", "traffic"]
    assert all(v["holds"] for v in results[0]["verdicts"]), results[0]["verdicts"]
    digests = {row["theta_digest"] for row in results[0]["learning"]["schemes"].values()}
    assert len(digests) == 1


def test_the_weights_move_and_the_loss_falls():
    result = run_ranks(3, lambda comm: run(comm, settings(steps=60), list(SCHEMES)))[0]
    losses = result["learning"]["schemes"]["zero3"]["losses"]
    assert len(losses) == 60 and np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


# The smallest forms of known faults, with their right answers (M is the MLP 7, 5, 3).


def test_case_memory_of_the_small_mlp():
    def held(S):
        def work(comm):
            scheme = S(M, comm)
            return scheme.ledger.resident_bytes

        return run_ranks(3, work)

    assert [held(S) for S in SCHEMES] == [
        [928, 928, 928],
        [472, 460, 460],
        [396, 382, 382],
        [320, 304, 304],
    ]


def test_case_traffic_of_the_small_mlp():
    precision = Precision.named("mixed", "float16", "float16")
    x, y = np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)

    def sent(S):
        def work(comm):
            scheme = S(M, comm, precision=precision)
            scheme.step((x, y))
            return scheme.bytes_comm_per_rank()

        return sum(run_ranks(3, work))

    assert [sent(S) for S in SCHEMES] == [464, 464, 464, 696]


@pytest.mark.parametrize("S", SCHEMES)
@pytest.mark.parametrize("size, numel", [(1, 1), (4, 2), (4, 1)])
def test_case_extremes_train_and_move_exactly_n_minus_one_vectors(S, size, numel):
    x = np.full((1, numel), 3, np.float32)

    def work(comm):
        scheme = S(Prepared(numel), comm, precision="fp32")
        for _ in range(3):
            scheme.step((x, x))
        by_name = {
            name: scheme.step_traffic.total(traffic="model", collective=name).sent_bytes
            for name in ("reduce-scatter", "all-gather")
        }
        return scheme.full_theta(), by_name

    results = run_ranks(size, work)
    theta = results[0][0]
    # Adam's first steps on a constant gradient are lr each.
    np.testing.assert_allclose(theta, -0.03, rtol=1e-5)
    collectives = {"reduce-scatter": 1, "all-gather": 2 if S is ZeRO3 else 1}
    for name, times in collectives.items():
        assert sum(r[1][name] for r in results) == times * (size - 1) * numel * 4
    assert all(r[0] is None for r in results[1:])


@pytest.mark.parametrize("S", SCHEMES)
@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
def test_the_owned_gradient_is_the_mean_over_ranks(S, precision):
    numel = 10

    def work(comm):
        scheme = S(Prepared(numel), comm, precision=precision)
        x = np.outer([1, 2], np.arange(numel)).astype(np.float32) * (comm.rank + 1)
        scheme.step((x, x))
        owned = {name: (lo, hi, array.astype(np.float32)) for name, lo, hi, array in scheme.owned(0)}
        return owned["grads"], owned["m"]

    results = run_ranks(4, work)
    # Rows add up to 3 i (rank + 1), whose mean over four ranks is 7.5 i, exact in every dtype.
    mean = 7.5 * np.arange(numel)
    assert [r[0][:2] for r in results] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert np.array_equal(np.concatenate([r[0][2] for r in results]), mean)
    np.testing.assert_allclose(np.concatenate([r[1][2] for r in results]), 0.1 * mean, rtol=1e-6)


@pytest.mark.parametrize("S", SCHEMES)
def test_each_element_is_owned_once_in_every_scheme(S):
    def work(comm):
        scheme = S(M, comm)
        return [[(name, lo, hi, array.size) for name, lo, hi, array in scheme.owned(u)] for u in scheme.units]

    for u, numel in enumerate(M.units):
        rows = [result[u] for result in run_ranks(3, work)]
        assert [row[0] for row in rows[0]] == ["params", "grads", "master", "m", "v"]
        for band in range(5):
            edges = [(row[band][1], row[band][2]) for row in rows]
            assert edges[0][0] == 0 and edges[-1][1] == numel
            assert all(a[1] == b[0] for a, b in zip(edges, edges[1:], strict=False))
            assert all(row[band][3] == hi - lo for row, (lo, hi) in zip(rows, edges, strict=True))


@pytest.mark.parametrize("S", SCHEMES)
@pytest.mark.parametrize("precision", ["mixed", "bf16", "fp32"])
def test_bands_are_the_formula_from_construction_on_and_while_a_step_runs(S, precision):
    seen = []

    class Watched(S):
        def backward_done(self, units):
            seen.append((self.comm.rank, self.ledger.resident_bytes, self.bytes_per_param()))
            super().backward_done(units)

        def update(self, scale):
            seen.append((self.comm.rank, self.ledger.resident_bytes, self.bytes_per_param()))
            super().update(scale)

    def work(comm):
        scheme = Watched(M, comm, precision=precision)
        expected = sum(formulas.resident_bytes(SCHEMES[S], checks.workload(scheme), comm.rank).values())
        seen.append((comm.rank, scheme.ledger.resident_bytes, scheme.bytes_per_param()))
        scheme.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))
        seen.append((comm.rank, scheme.ledger.resident_bytes, scheme.bytes_per_param()))
        assert scheme.ledger.transient_bytes == 0
        return expected

    expected = run_ranks(3, work)
    # Gradients that are sharded are finished unit by unit.
    assert len(seen) == 3 * (3 + (2 if "grads" in S.sharded else 1))
    assert all(held == expected[rank] and per == held / 58 for rank, held, per in seen)


def test_gathered_units_live_one_at_a_time():
    def work(comm):
        scheme = ZeRO3(MLP((20, 30, 30, 20)), comm)
        scheme.step((np.ones((2, 20), np.float32), np.ones((2, 20), np.float32)))
        return scheme.ledger.transient_peaks()

    for peaks in run_ranks(3, work):
        assert peaks["gathered unit"] == 4 * (30 * 30 + 30)
        assert peaks["unit gradient"] == 4 * (30 * 30 + 30)


def test_zero2_holds_one_units_gradient_at_a_time():
    def work(comm):
        scheme = ZeRO2(MLP((20, 30, 30, 20)), comm)
        scheme.step((np.ones((2, 20), np.float32), np.ones((2, 20), np.float32)))
        return scheme.ledger.transient_peaks()["unit gradient"]

    assert run_ranks(3, work) == [4 * (30 * 30 + 30)] * 3


@pytest.mark.parametrize("S", SCHEMES)
def test_traffic_is_counted_by_phase_unit_and_peer(S):
    def work(comm):
        scheme = S(M, comm, precision="fp32")
        scheme.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))
        traffic = scheme.step_traffic
        phases = {
            phase: traffic.total(traffic="model", phase=phase).sent_bytes
            for phase in ("forward", "backward", "update")
        }
        units = [
            [
                traffic.total(traffic="model", unit=u, collective=name).sent_bytes
                for name in ("reduce-scatter", "all-gather")
            ]
            for u in range(2)
        ]
        right = traffic.total(traffic="model", peer=(comm.rank + 1) % 3)
        left = traffic.total(traffic="model", peer=(comm.rank - 1) % 3)
        return phases, units, right, left, traffic.total(traffic="control").sent_bytes

    for rank, (phases, units, right, left, control) in enumerate(run_ranks(3, work)):
        scatter = 4 * sum(sum(formulas.reduce_scatter_sent(n, 3, rank)) for n in M.units)
        gather = 4 * sum(sum(formulas.all_gather_sent(n, 3, rank)) for n in M.units)
        expected = {
            DP: (0, scatter + gather, 0),
            ZeRO1: (0, scatter, gather),
            ZeRO2: (0, scatter, gather),
            ZeRO3: (gather, gather + scatter, 0),
        }[S]
        assert (phases["forward"], phases["backward"], phases["update"]) == expected
        gathers = 2 if S is ZeRO3 else 1
        assert units == [
            [
                4 * sum(formulas.reduce_scatter_sent(n, 3, rank)),
                4 * gathers * sum(formulas.all_gather_sent(n, 3, rank)),
            ]
            for n in M.units
        ]
        assert right.sent_bytes == sum(expected) and right.received_bytes == 0
        assert left.received_bytes > 0 and left.sent_bytes == 0
        # Once the rows of the one micro-batch, once loss, overflow and sum of squares.
        assert control == 2 * (8 + 24)


@pytest.mark.parametrize("S", SCHEMES)
def test_ranks_with_other_settings_all_raise_the_same(S):
    def work(comm):
        with pytest.raises(ValueError) as caught:
            S(M, comm, optimizer=Adam(lr=0.1 if comm.rank == 2 else 0.2))
        return str(caught.value)

    messages = run_ranks(3, work)
    assert len(set(messages)) == 1
    assert messages[0].startswith("optimizer: expected the same on every rank") and "rank 2" in messages[0]


OTHERS = {
    "model": {"model": MLP((7, 4, 3))},
    "precision": {"precision": "fp32"},
    "optimizer": {"optimizer": SGD()},
    "training": {"training": Training(clip_norm=1.0)},
    "reducer": {"reducer": Naive},
    "initial weights": {"init_seed": 1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_setting_that_ranks_must_share_is_compared(name):
    def work(comm):
        options = {"model": M, **(OTHERS[name] if comm.rank == 2 else {})}
        with pytest.raises(ValueError) as caught:
            ZeRO1(options.pop("model"), comm, **options)
        return str(caught.value)

    (message,) = set(run_ranks(3, work))
    assert message.startswith(f"{name}: expected the same on every rank") and "on rank 2" in message


@pytest.mark.parametrize("S", SCHEMES)
def test_what_is_owned_are_views_of_the_bands(S):
    def work(comm):
        scheme = S(M, comm)
        for u in scheme.units:
            for _, _, _, array in scheme.owned(u):
                array[...] = 5
        bands = [*scheme.params, *scheme.grads]
        bands += [slot for state in scheme.optimizer_state for slot in state.values()]
        return sum(int((band == 5).sum()) for band in bands)

    # Five arrays of 58 elements, each owned once.
    assert sum(run_ranks(3, work)) == 5 * 58


def test_ranks_with_other_initial_weights_all_raise_the_same():
    def work(comm):
        with pytest.raises(
            ValueError, match="^initial weights: expected the same on every rank.*rank 1"
        ) as c:
            ZeRO3(M, comm, init_seed=1 if comm.rank == 1 else 0)
        return str(c.value)

    assert len(set(run_ranks(3, work))) == 1


def test_a_model_that_fails_on_one_rank_fails_on_all():
    class Broken(MLP):
        def init(self, seed):
            raise ValueError("no weights here")

    def work(comm):
        with pytest.raises(ValueError, match="no weights here"):
            ZeRO1((Broken if comm.rank == 1 else MLP)((7, 5, 3)), comm)

    run_ranks(3, work)


def test_a_loss_that_is_not_finite_is_named_on_every_rank():
    def work(comm):
        scheme = ZeRO2(M, comm)
        x = np.ones((2, 7), np.float32)
        if comm.rank == 2:
            x[1, 3] = np.nan
        with pytest.raises(FloatingPointError) as caught:
            scheme.step((x, np.ones((2, 3), np.float32)))
        return str(caught.value)

    messages = set(run_ranks(3, work))
    assert messages == {"loss: expected a finite number, got nan on rank 2 in step 1 of ZeRO-2"}


@pytest.mark.parametrize(
    "x, y, words",
    [
        (np.ones((2, 7)), np.ones((2, 3), np.float32), "x: expected float32 rows"),
        (np.ones((2, 7), np.float32), np.ones((2, 3), int), "y: expected float32 rows"),
        (np.ones((0, 7), np.float32), np.ones((0, 3), np.float32), "batches: expected rows on some rank"),
        (np.ones((2, 7), np.float32), np.ones((3, 3), np.float32), "y: expected as many rows as x, 2, got 3"),
        (
            np.ones((2, 7), np.float32),
            np.ones((2, 1), np.float32),
            r"y: expected shape \(2, 3\), got \(2, 1\)",
        ),
        ([[1.0] * 7], np.ones((1, 3), np.float32), "x: expected a numpy array, got list"),
    ],
)
def test_a_batch_that_is_none_is_refused(x, y, words):
    def work(comm):
        with pytest.raises((ValueError, TypeError), match=words):
            DP(M, comm).step((x, y))

    run_ranks(1, work)


def test_a_number_of_ranks_is_no_communicator():
    with pytest.raises(TypeError, match="^comm: expected an mpi4py communicator, .* got int"):
        DP(M, 8)


def test_weights_that_overflow_in_the_last_step_are_named():
    def work(comm):
        with pytest.raises(FloatingPointError, match="^weights: .* on rank . after step 1 of data parallel"):
            run(comm, settings(optimizer=Adam(lr=1e7), steps=1), list(SCHEMES))

    run_ranks(3, work)


def test_full_theta_is_in_unit_order_and_on_rank_0_alone():
    expected = np.concatenate(list(M.init(0)))
    for S in SCHEMES:
        thetas = run_ranks(3, lambda comm, S=S: S(M, comm).full_theta())
        assert np.array_equal(thetas[0], expected) and thetas[0].dtype == np.float32
        assert thetas[1] is None and thetas[2] is None


@pytest.mark.parametrize("reducer", [Ring, ReversedRing])
@pytest.mark.parametrize("wire", WIRES, ids=" ".join)
def test_what_transients_may_take_is_what_they_take(wire, reducer):
    def work(comm):
        found = []
        for S, claim in SCHEMES.items():
            scheme = settings(M, *wire, reducer=reducer, training=Training(clip_norm=1.0)).build(S, comm)
            scheme.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))
            found.append(checks.memory_evidence(scheme, claim))
        return found

    for rows in run_ranks(3, work):
        for row in rows:
            limits, taken = row["transient_limit_by_kind_bytes"], row["transient_peak_by_kind_bytes"]
            # The optimizer's is of the whole unit, for all; activations have none.
            assert taken.pop("optimizer scratch") <= limits["optimizer scratch"]
            del taken["activations"]
            assert taken == {kind: limits[kind] for kind in taken}


def test_a_gradient_of_zeros_is_not_clipped():
    def work(comm):
        scheme = ZeRO2(Prepared(6), comm, training=Training(clip_norm=1.0))
        scheme.step((np.zeros((1, 6), np.float32), np.zeros((1, 6), np.float32)))
        return scheme.grad_norm, scheme.skipped, scheme.full_theta()

    norm, skipped, theta = run_ranks(2, work)[0]
    assert norm == 0 and not skipped and (theta == 0).all()


@pytest.mark.parametrize("size", [1, 2])
def test_norms_of_blocks_longer_than_a_piece_are_replayed_to_the_bit(size):
    model = MLP((300, 300))
    assert model.n_params // size > NORM_PIECE
    options = {"model": model, "precision": "fp32", "training": Training(clip_norm=0.1), "steps": 5}
    result = run_with(size=size, **options)
    assert not failing(result)


def test_a_norm_that_changes_no_weight_must_be_right_all_the_same(monkeypatch):
    right = Scheme.squares
    monkeypatch.setattr(Scheme, "squares", lambda self: right(self) * (1 + 1e-15))
    result = run_with(precision="fp32", training=Training(clip_norm=1e6))
    assert failing(result) == ["reference"]
    assert "in what is no weight: loss, norm or copy" in says(result, "reference")
