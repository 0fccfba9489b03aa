"""The checks one by one: what each must see, on which rank, and what it must not take for another thing."""

import contextlib

import numpy as np
import pytest
from helpers import M, failing, run_with, says, settings
from threadworld import run_ranks

from zero_mpi import checks, engine, formulas
from zero_mpi.comm import SharedMistake
from zero_mpi.data import SeedStream
from zero_mpi.model import MLP
from zero_mpi.optim import SGD
from zero_mpi.precision import Precision
from zero_mpi.reference import Reference
from zero_mpi.run import run
from zero_mpi.schemes import DP, SCHEMES, ZeRO1, ZeRO2, ZeRO3


def test_same_bits_is_about_bits():
    nan = np.array([np.nan, 1], np.float32)
    assert checks.same_bits(nan, nan.copy())
    assert not checks.same_bits(np.zeros(2, np.float32), -np.zeros(2, np.float32))
    assert not checks.same_bits(np.zeros(2, np.float32), np.zeros(3, np.float32))


def test_a_difference_that_is_no_number_is_infinite():
    a, nan = np.ones(3, np.float32), np.array([1, np.nan, 1], np.float32)
    assert checks.largest_difference(a, nan) == np.inf
    assert checks.largest_difference(nan, nan) == 0.0
    assert checks.largest_difference(a, a + np.float32(0.25)) == 0.25
    assert checks.largest_difference(a[:0], a[:0]) == 0.0


def test_a_replica_that_differs_is_seen_though_owners_agree():
    def work(comm):
        a, b = DP(M, comm), ZeRO1(M, comm)
        if comm.rank == 1:
            b.params[0][0] += 1  # rank 0 owns it
        return checks.compare(b, a), checks.replicas_agree(b), checks.replicas_agree(a)

    results = run_ranks(3, work)
    assert [r[0].identical for r in results] == [True, False, True]
    assert [r[0].owned for r in results] == [0, 0, 0]
    assert results[1][0].replica == pytest.approx(1, abs=1e-3)  # a float16 sum
    assert {r[1:] for r in results} == {(False, True)}


def test_an_owners_block_that_differs_is_seen():
    def work(comm):
        a, b = DP(M, comm), ZeRO3(M, comm)
        if comm.rank == 2:
            b.owned_theta(1)[0] += np.float32(0.5)
        return checks.compare(b, a)

    results = run_ranks(3, work)
    assert [r.identical for r in results] == [True, True, False]
    assert [r.owned for r in results] == [0, 0, 0.5]


def test_the_reference_is_compared_with_rank_0s_replica_too():
    def work(comm):
        scheme = DP(M, comm)
        theta = scheme.full_theta()
        fine = checks.matches_reference(scheme, theta, theta.copy())
        scheme.params[1][17] += 1
        return fine, checks.matches_reference(scheme, theta, theta.copy())

    ((fine, broken),) = run_ranks(1, work)
    assert fine == (True, 0.0) and broken == (False, 0.0)


def test_the_references_loss_counts(monkeypatch):
    original = Reference.step
    monkeypatch.setattr(Reference, "step", lambda self, batches: original(self, batches) + 1e-12)
    assert failing(run_with()) == ["reference"]


def test_replicas_that_differ_between_ranks_fail_even_data_parallel(monkeypatch):
    class Dirty(DP):
        key = "dirty"

        def update(self, scale):
            super().update(scale)
            if self.comm.rank == 1:
                self.params[0][0] += 1  # rank 0 owns it

    monkeypatch.setitem(SCHEMES, Dirty, formulas.DP)
    result = run_with([Dirty], reference=False)
    assert failing(result) == ["learning"]
    assert result["learning"]["schemes"]["dirty"]["replicas_differ_steps"] == 5


def test_the_largest_difference_of_all_ranks_is_reported(monkeypatch):
    class Off(ZeRO3):
        key = "off"

        def update(self, scale):
            super().update(scale)
            self.owned_theta(0)[0] += np.float32([0.25, 0.5, 0.125][self.comm.rank])

    monkeypatch.setitem(SCHEMES, Off, formulas.ZERO3)
    row = run_with([DP, Off], steps=1)["learning"]["schemes"]["off"]
    assert row["max_abs_difference"] == pytest.approx(0.5, abs=1e-6)
    assert (row["identical_steps"], row["first_difference_step"]) == (0, 1)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_fault_on_any_rank_is_named(monkeypatch, rank):
    class Hoarding(ZeRO3):
        key = "hoarding"

        def free_gathered(self, u):
            if self.comm.rank != rank:
                super().free_gathered(u)

    monkeypatch.setitem(SCHEMES, Hoarding, formulas.ZERO3)
    result = run_with([DP, Hoarding])
    assert failing(result) == ["memory"]
    assert f"ZeRO-3, rank {rank}: step 1:" in says(result, "memory")


def test_bytes_that_are_lost_on_the_way_fail_traffic(monkeypatch):
    class Deaf(ZeRO1):
        key = "deaf"

        def step(self, *batches):
            loss = super().step(*batches)
            if self.comm.rank == 1:
                for count in self.step_traffic._counts.values():
                    count[3] = 0
            return loss

    monkeypatch.setitem(SCHEMES, Deaf, formulas.ZERO1)
    result = run_with([DP, Deaf])
    assert failing(result) == ["traffic"]
    assert "B sent," in says(result, "traffic") and "B received" in says(result, "traffic")


def test_the_sum_over_ranks_is_held_to_its_own_formula(monkeypatch):
    monkeypatch.setattr(formulas, "sent_bytes_all_ranks", lambda *args: 1)
    result = run_with()
    assert failing(result) == ["traffic"]
    assert "all ranks together sent" in says(result, "traffic")


def test_messages_are_held_to_their_formula():
    evidence = {
        "counted": True,
        "sent_bytes": {"all-gather": 5},
        "formula_bytes": {"all-gather": 5},
        "sent_messages": 3,
        "formula_messages": 2,
        "control_bytes": 16,
        "control_messages": 2,
        "control_formula_bytes": 16,
        "control_formula_messages": 2,
    }
    assert checks.traffic_fault(evidence) == "sent 3 messages, formula 2"
    right = {**evidence, "sent_messages": 2}
    assert checks.traffic_fault(right) == ""
    loud = checks.traffic_fault({**right, "control_bytes": 280})
    assert loud == "control: sent 280 B in 2 messages, formula 16 B in 2"
    assert "in 3 messages" in checks.traffic_fault({**right, "control_messages": 3})


def test_losses_are_added_in_rank_order_in_double():
    losses = [1e16, -1e16, 1.0]

    def work(comm):
        return engine._agreed(DP(M, comm), losses[comm.rank]).loss

    # (1e16 - 1e16) + 1 is 1 in double; with the last one before another it is 0, in float32 too.
    assert run_ranks(3, work) == [1 / 3] * 3


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_loss_of_any_non_number_is_refused(value):
    def work(comm):
        with pytest.raises(FloatingPointError, match=f"got {value} on rank 1 in step 0 of data parallel"):
            engine._agreed(DP(M, comm), value if comm.rank == 1 else 1.0)

    run_ranks(2, work)


def test_activations_are_counted_and_given_up_as_backward_goes():
    seen = []

    class Watched(DP):
        def grad_ready(self, u):
            seen.append((u, self.ledger.alive_bytes("activations")))
            super().grad_ready(u)

    def work(comm):
        scheme = Watched(M, comm)
        scheme.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))
        return scheme.ledger.transient_peaks()["activations"]

    # Two rows of float32: outputs of 5 and 3, and the gradient of the 3; then the gradient of the 5.
    assert run_ranks(1, work) == [2 * 4 * (5 + 3 + 3)]
    assert seen == [(1, 2 * 4 * (5 + 5)), (0, 0)]


def test_schemes_on_one_communicator_count_apart():
    def work(comm):
        a, b = DP(M, comm), DP(M, comm)
        before = comm.traffic.total()
        a.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))
        assert comm.traffic.total() == before
        return a.bytes_comm_per_rank(), b.bytes_comm_per_rank()

    for sent, nothing in run_ranks(3, work):
        assert sent > 0 and nothing == 0


def test_schemes_keep_the_communicators_limit_on_messages():
    def work(comm):
        result = run(comm, settings(), list(SCHEMES))
        assert all(verdict["holds"] for verdict in result["verdicts"])
        return result["traffic"]["dp"]["ranks"][0]["sent_messages"]

    assert run_ranks(3, work, max_message_bytes=2**30) == [8, 8, 8]
    # Blocks of 13 or 14, and 6, float32 elements, in messages of 24 B.
    assert run_ranks(3, work, max_message_bytes=24) == [2 * (3 + 3 + 1 + 1)] * 3


def test_bytes_within_a_host_and_across_hosts_are_counted_apart():
    hosts = ["one", "one", "two", "two"]

    def work(comm):
        scheme = ZeRO3(M, comm)
        scheme.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))
        evidence = checks.traffic_evidence(scheme, formulas.ZERO3, hosts)
        places = [evidence["sent_within_host_bytes"], evidence["sent_across_hosts_bytes"]]
        return places, sum(evidence["sent_bytes"].values())

    # The ring sends to the right: from 0 and 2 within a host, from 1 and 3 to the other.
    for rank, (places, sent) in enumerate(run_ranks(4, work)):
        assert places == ([sent, 0] if rank % 2 == 0 else [0, sent])


def test_a_job_on_several_hosts_says_so(monkeypatch):
    from zero_mpi import report
    from zero_mpi.comm import Communicator

    monkeypatch.setattr(Communicator, "hosts", lambda comm: ["one", "two", "two"])
    result = run_with(size=3)
    assert failing(result) == []
    text = "\n".join(report.traffic(result))
    assert "Traffic per rank and step by where it goes, bytes sent" in text
    assert [row["sent_across_hosts_bytes"] > 0 for row in result["traffic"]["dp"]["ranks"]] == [
        True,
        False,
        True,
    ]


def test_a_nan_behind_the_first_piece_is_a_difference_too():
    a, b = np.zeros(70_000, np.float32), np.zeros(70_000, np.float32)
    b[-1] = np.nan
    assert checks.largest_difference(a, b) == np.inf
    # Of 16-bit numbers the difference may be none.
    assert checks.largest_difference(np.float16([60000.0]), np.float16([-60000.0])) == 120000.0


def test_losses_that_part_fail_learning(monkeypatch):
    class Boasting(ZeRO2):
        def step(self, *micro_batches):
            return super().step(*micro_batches) - 1e-3

    monkeypatch.setitem(SCHEMES, Boasting, SCHEMES[ZeRO2])
    result = run_with([DP, Boasting])
    assert failing(result) == ["learning"]


def test_one_scheme_on_one_rank_is_compared_with_nobody():
    (verdict,) = [v for v in run_with([DP], size=1)["verdicts"] if v["check"] == "learning"]
    assert verdict["holds"] is None and "nobody to differ from" in verdict["says"]
    assert failing(run_with([ZeRO2], size=2)) == []


def test_the_replay_refuses_an_optimizer_it_does_not_know_before_anybody_waits():
    class Other(SGD):
        """Known by descent."""

    class Sign:
        slots, lr, weight_decay = (), 0.01, 0.0

        def describe(self):
            return "sign lr 0.01"

        def scratch_numel(self, numel):
            return numel

        def update(self, theta, grad, state, step, *, scale=1.0, lr=None, decay=True, scratch=None):
            theta -= np.float32(self.lr if lr is None else lr) * np.sign(grad).astype(np.float32)

    assert failing(run_with(optimizer=Other())) == []
    with pytest.raises(
        SharedMistake, match="^reference: expected Adam or SGD, .*, got Sign; it can be left out"
    ):
        run_with(optimizer=Sign())
    # A plain class, compared between ranks by what it says of itself.
    assert failing(run_with(optimizer=Sign(), reference=False)) == []


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"init": staticmethod(lambda seed: iter([np.zeros(40, np.float32)]))},
            "expected the weights of unit 1, .*, got no more",
        ),
        (
            {"init": staticmethod(lambda seed: iter([np.zeros(80, np.float32)] * 2))},
            r"shape \(40,\), got float32 of shape \(80,\)",
        ),
        ({"init": staticmethod(lambda seed: iter([np.zeros(40)] * 2))}, "contiguous float32 .*, got float64"),
        (
            {"init": staticmethod(lambda seed: iter([np.zeros(80, np.float32)[::2]] * 2))},
            "got non-contiguous float32",
        ),
        ({"n_params": property(lambda self: 59)}, "^n_params: expected the sum of units, 58, got 59"),
    ],
)
@pytest.mark.parametrize("S", [DP, ZeRO3])
def test_a_model_that_is_none_is_refused_by_all_alike(S, change, words):
    class Wrong(MLP):
        pass

    for name, value in change.items():
        setattr(Wrong, name, value)
    with pytest.raises(SharedMistake, match=words):
        run_ranks(3, lambda comm: S(Wrong((7, 5, 3)), comm))


def test_a_precision_that_one_rank_cannot_have_is_said_by_all():
    with pytest.raises(SharedMistake, match="^precision: expected one of"):
        run_ranks(3, lambda comm: DP(M, comm, precision="fp16" if comm.rank == 1 else "mixed"))
    with pytest.raises(ValueError, match="^grads dtype: expected float32 or 16 bits at rest, got float64"):
        Precision("own", "float32", "float64", "float64", "float32")


class Fragile(MLP):
    """Fails in backward when it is told to."""

    broken = False

    def backward(self, u, params, saved, dy, out):
        if self.broken and u == 0:
            raise KeyError("backward")
        return super().backward(u, params, saved, dy, out)


@pytest.mark.parametrize("S", [DP, ZeRO1, ZeRO2, ZeRO3])
def test_a_step_after_an_error_of_the_model_has_no_more_alive_than_any(S):
    def work(comm):
        peaks = []
        for breaks in (False, True):
            model = Fragile((7, 5, 3))
            scheme = S(model, comm)
            batch = next(SeedStream(7, 4, 7, 3).global_batches(comm.size))[comm.rank][0]
            model.broken = breaks
            with pytest.raises(KeyError) if breaks else contextlib.nullcontext():
                scheme.step(batch)
            model.broken = False
            scheme.ledger.reset_peaks()
            scheme.step(batch)
            peaks.append(scheme.ledger.transient_peaks())
            assert scheme.ledger.transient_bytes == 0
        assert peaks[0] == peaks[1]

    run_ranks(3, work)


def test_activations_in_a_dict_are_counted_too():
    class Saves(MLP):
        def forward(self, u, params, x):
            y, saved = super().forward(u, params, x)
            return y, {"ends": saved}

        def backward(self, u, params, saved, dy, out):
            return super().backward(u, params, saved["ends"], dy, out)

    def peak(model):
        def work(comm):
            scheme = DP(model, comm)
            scheme.step(next(SeedStream(7, 4, 7, 3).global_batches(comm.size))[comm.rank][0])
            return scheme.ledger.peak_bytes("activations")

        return run_ranks(2, work)

    assert peak(Saves((7, 5, 3))) == peak(MLP((7, 5, 3)))


def test_a_batch_that_is_no_pair_is_named():
    def work(comm):
        x, _ = next(SeedStream(7, 4, 7, 3).global_batches(1))[0][0]
        DP(M, comm).step(x)

    with pytest.raises(TypeError, match=r"^batch: expected a pair \(x, y\), got ndarray"):
        run_ranks(1, work)
