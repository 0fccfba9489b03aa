"""On real MPI ranks: bits, bytes, messages and memory at many N; groups; waiting; what MPI itself does."""

import time

import numpy as np
import pytest
from helpers import WIRES, settings
from models import TinyUnits

from zero_mpi import formulas, ring
from zero_mpi.comm import Communicator, OutOfStep
from zero_mpi.layout import Blocks
from zero_mpi.model import MLP
from zero_mpi.precision import dtype_of
from zero_mpi.run import run
from zero_mpi.schemes import SCHEMES

MODELS = {"mlp": MLP(), "7-5-3": MLP((7, 5, 3)), "tiny": TinyUnits((1, 2, 5, 3))}
SIZES = [1, 2, 3, 4, 5, 7, 8]


def at_sizes(sizes):
    return [pytest.param(n, marks=pytest.mark.mpi(min_size=n)) for n in sizes]


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("n", at_sizes(SIZES))
def test_fifty_steps_are_the_same_bits_in_all_schemes_and_the_oracle(ranks_of, n, model, precision):
    comm = ranks_of(n)
    if comm is None:
        return
    wide = model == "mlp"
    options = {"model": MODELS[model], "precision": precision, "steps": 50}
    if wide:
        from zero_mpi.data import SeedStream

        options["data"] = SeedStream(7, 8, 64, 64)
    result = run(comm, settings(**options), list(SCHEMES))
    assert all(verdict["holds"] for verdict in result["verdicts"]), result["verdicts"]
    learning = result["learning"]
    assert learning["steps"] == learning["reference"]["dp"]["identical_steps"] == 50
    assert {row["identical_steps"] for row in learning["schemes"].values()} == {50}
    assert {row["max_abs_difference"] for row in learning["schemes"].values()} == {0.0}


@pytest.mark.parametrize("wire", WIRES, ids=" ".join)
@pytest.mark.parametrize("n", at_sizes([1, 2, 3, 4, 5, 6, 7, 8, 16, 32]))
def test_bytes_equal_the_formula_where_n_divides_nothing(ranks_of, n, wire):
    comm = ranks_of(n)
    if comm is None:
        return
    result = run(comm, settings(MLP((7, 5, 3)), *wire, steps=2), list(SCHEMES))
    assert all(verdict["holds"] for verdict in result["verdicts"]), result["verdicts"]
    for row in result["traffic"].values():
        assert row["all_ranks_sent_bytes"] == row["all_ranks_formula_bytes"]
        assert sum(row["mean_units"].values()) == pytest.approx(row["formula_units"], rel=1e-12)
        assert len(row["ranks"]) == n


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("limit", [7, 2**30])
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 41, 1000])
def test_rings_on_mpi_are_exact_for_every_dtype_length_and_limit(numel, limit, dtype):
    comm = Communicator(max_message_bytes=limit)
    xs = [((np.arange(numel) * 7 + r * 3) % 4).astype(dtype_of(dtype)) for r in range(comm.size)]
    expected = sum((x.astype(np.float64) for x in xs), np.zeros(numel))
    x = xs[comm.rank].copy()
    ring.all_reduce(comm, x)
    assert np.array_equal(x.astype(np.float64), expected)
    items = x.itemsize * (
        sum(formulas.reduce_scatter_sent(numel, comm.size, comm.rank))
        + sum(formulas.all_gather_sent(numel, comm.size, comm.rank))
    )
    count = comm.traffic.total(traffic="model")
    assert count.sent_bytes == items
    total = sum(int(n) for n in comm.allgather_scalar(count.sent_bytes, np.int64))
    received = sum(int(n) for n in comm.allgather_scalar(count.received_bytes, np.int64))
    assert total == received == 2 * (comm.size - 1) * numel * x.itemsize
    comm.free()


@pytest.mark.mpi(min_size=3)
def test_a_longer_block_on_one_rank_is_named_not_summed(comm):
    comm = comm.split(0 if comm.rank < 3 else None)
    # Never freed: warnings may be on their way in it, which the next communicator of its number would meet.
    if comm is None:
        return
    # Rank 1 hands over nine elements where the others have six; each of its neighbours sees it or waits.
    x = np.ones(9 if comm.rank == 1 else 6, np.float32)
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    with comm.collective("all-gather"):
        if comm.rank == 2:
            with pytest.raises(RuntimeError, match="rank 2 expected 8 B from rank 1, got more"):
                comm.sendrecv(x[:2], right, x[2:4], left)
        else:
            size = Blocks(x.size, 3).size(comm.rank)
            received = np.empty(Blocks(9, 3).largest, np.float32)[: 2 if comm.rank == 0 else size - 1]
            comm.sendrecv(x[:size], right, received[:2], left)


@pytest.mark.mpi(min_size=3)
def test_another_order_of_units_on_one_rank_is_named(comm):
    comm = comm.split(0 if comm.rank < 3 else None)
    # Never freed: warnings may be on their way in it, which the next communicator of its number would meet.
    if comm is None:
        return
    order = (0, 1) if comm.rank == 1 else (1, 0)
    comm.unit = order[0]
    x = np.ones((40, 18)[order[0]], np.float32)
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    part = x[:4]
    with comm.collective("reduce-scatter"):
        if comm.rank == 0:
            comm.sendrecv(part, right, np.empty(4, np.float32), left)
        else:
            other = {1: (0, 1, 0), 2: (1, 0, 1)}[comm.rank]
            words = f"rank {comm.rank} is at .* of unit {other[0]}, rank {left} at .* unit {other[1]}"
            with pytest.raises(RuntimeError, match=words):
                comm.sendrecv(part, right, np.empty(4, np.float32), left)


@pytest.mark.mpi(min_size=2)
def test_who_gives_ranks_up_leaves_no_message_behind(comm):
    from mpi4py import MPI

    part = comm.split(0)
    right, left = (part.rank + 1) % part.size, (part.rank - 1) % part.size
    x = np.ones(4, np.float32)
    # The last rank is at another unit: its neighbours find it, and the others hear of it hop by hop.
    part.unit = int(part.rank == part.size - 1)
    with pytest.raises(OutOfStep), part.collective("reduce-scatter"):
        for _ in range(part.size):
            part.sendrecv(x, right, np.empty_like(x), left)
    came, free = part.transport._comm.Iprobe, part.transport.free
    left_behind = []
    part.transport.free = lambda: left_behind.append(came(MPI.ANY_SOURCE, MPI.ANY_TAG)) or free()
    part.give_up()
    assert left_behind == [False]


@pytest.mark.mpi(min_size=2)
def test_groups_count_for_themselves(comm):
    half = comm.split(comm.rank % 2, key=-comm.rank)
    x = np.full(10, comm.rank, np.float32)
    ring.all_reduce(half, x)
    assert x[0] == sum(r for r in range(comm.size) if r % 2 == comm.rank % 2)
    assert comm.traffic.total(traffic="model").sent_bytes == 0
    if half.size > 1:
        assert half.traffic.total(traffic="model").sent_bytes > 0
    # Ordered by key: the highest rank comes first.
    assert half.allgather_scalar(comm.rank, np.int64)[0] >= comm.rank
    half.free()


@pytest.mark.mpi
def test_schemes_share_one_duplicate_of_a_communicator():
    from mpi4py import MPI

    # MPI libraries run out of communicators: MPICH after some 2000.
    ours = MPI.COMM_WORLD.Dup()
    for _ in range(2500):
        communicator = Communicator(ours)
    assert communicator.allgather_scalar(1).sum() == communicator.size
    assert communicator.transport._comm != ours
    ours.Free()


@pytest.mark.mpi(min_size=2)
def test_groups_keep_the_limit_on_messages():
    comm = Communicator(max_message_bytes=4)
    group = comm.split(0)
    ring.all_gather(group, np.ones(3 * comm.size, np.float32))
    count = group.traffic.total()
    assert count.sent_messages == 3 * (comm.size - 1) == count.sent_bytes // 4
    group.free()
    comm.free()


@pytest.mark.mpi
def test_ranks_are_patient_where_they_outnumber_cores(comm):
    import os

    cores = set().union(*comm.allgather_object(sorted(os.sched_getaffinity(0))))
    if len(set(comm.hosts())) == 1:
        assert comm.transport._ranks_per_core == comm.size / len(cores)
        assert comm.defers_sends == (comm.size > len(cores))


@pytest.mark.mpi(min_size=2)
def test_ranks_wait_for_rank_0_without_spinning(comm):
    cpu, wall = time.process_time(), time.perf_counter()
    with comm.root_works():
        if comm.rank == 0:
            time.sleep(0.5)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert wall >= 0.4
    assert cpu < 0.25


@pytest.mark.mpi
def test_agreement_raises_the_same_on_all_ranks_or_on_none(comm):
    comm.agree(steps=3, dims=(1, 2))
    if comm.size == 1:
        return
    with pytest.raises(ValueError) as caught:
        comm.agree(steps=3, dims=(1, 2 + (comm.rank == comm.size - 1)))
    messages = comm.allgather_object(str(caught.value))
    expected = f"expected the same on every rank, got (1, 2) on rank 0 and (1, 3) on rank {comm.size - 1}"
    assert messages == [f"dims: {expected}"] * comm.size


@pytest.mark.mpi
def test_one_ranks_mistake_is_everybodys(comm):
    with pytest.raises(ValueError, match="only here") as caught, comm.together():
        if comm.rank == comm.size - 1:
            raise OSError("only here")
    whose = f" (rank {comm.size - 1})" if comm.size > 1 else ""
    assert str(caught.value) == f"only here{whose}"


@pytest.mark.mpi
def test_audit_finds_nothing_outside_the_ledger_in_any_scheme(comm):
    for precision in ("fp32", "mixed", "bf16"):
        model = MLP((64, 128, 128, 64))
        from zero_mpi.data import SeedStream

        result = run(
            comm,
            settings(
                model=model,
                precision=precision,
                data=SeedStream(7, 8, 64, 64),
                steps=1,
                audit_memory=True,
                reference=False,
            ),
            list(SCHEMES),
        )
        assert all(verdict["holds"] for verdict in result["verdicts"]), result["verdicts"]
        for row in result["audit"].values():
            assert all(rank["resident_outside_bytes"] <= 1024 for rank in row["ranks"])


@pytest.mark.mpi(min_size=2)
def test_ranks_that_are_in_no_communicator_or_in_two_groups_are_refused():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with pytest.raises(
        ValueError, match="^comm: expected a communicator that this rank is in, got COMM_NULL"
    ):
        Communicator(MPI.COMM_NULL)
    half = world.Split(int(world.rank > 0))
    both = half.Create_intercomm(0, world, 1 if world.rank == 0 else 0)
    with pytest.raises(ValueError, match="^comm: expected one group of ranks, got an intercommunicator"):
        Communicator(both)
    both.Free()
    half.Free()
