"""The two checks as the project's founding document states them, with a communicator in N's place.

Each rank hands in its own batch; sizes are sub-communicators of the job.
"""

import numpy as np
import pytest

from zero_mpi.model import MLP
from zero_mpi.schemes import DP, SCHEMES, ZeRO1, ZeRO2, ZeRO3

SIZES = [pytest.param(n, marks=pytest.mark.mpi(min_size=n)) for n in (1, 2, 4, 8, 16, 32)]

# Check one: identical learning.


@pytest.mark.parametrize("N", SIZES)
@pytest.mark.parametrize("precision", ["mixed", "fp32"])
def test_all_schemes_match_data_parallel(ranks_of, N, precision):
    comm = ranks_of(N)
    if comm is None:
        return
    m, STEPS = MLP(), 10
    rng = np.random.default_rng(7)
    batches = [
        [
            (
                rng.standard_normal((8, 64)).astype(np.float32),
                rng.standard_normal((8, 64)).astype(np.float32),
            )
            for _ in range(N)
        ]
        for _ in range(STEPS)
    ]
    final, losses = {}, {}
    for S in SCHEMES:
        s = S(m, comm, precision=precision)
        losses[s.name] = [s.step(batches[t][comm.rank]) for t in range(STEPS)]
        final[s.name] = s.full_theta()
    if comm.rank == 0:
        base = final["data parallel"]
        for name, theta in final.items():
            assert np.array_equal(theta, base), name
    if (N, precision) == (8, "fp32"):
        table = "3.011041 1.719282 1.384160 1.254348 1.096185 1.078573 1.048894 1.017597 1.000511 1.021900"
        assert len(losses) == 4
        for name, values in losses.items():
            assert " ".join(f"{loss:.6f}" for loss in values) == table, name


# Check two: measured against predicted.

PREDICTED = {
    DP: lambda N: 16.0,
    ZeRO1: lambda N: 4 + 12 / N,
    ZeRO2: lambda N: 2 + 14 / N,
    ZeRO3: lambda N: 16 / N,
}


@pytest.mark.parametrize("N", SIZES)
@pytest.mark.parametrize("S", list(PREDICTED))
def test_resident_bytes_match_formula(ranks_of, S, N):
    comm = ranks_of(N)
    if comm is None:
        return
    s = S(MLP(), comm)
    assert s.bytes_per_param() == pytest.approx(PREDICTED[S](N))


@pytest.mark.parametrize("N", SIZES[1:])
@pytest.mark.parametrize("S,mult", [(DP, 2), (ZeRO1, 2), (ZeRO2, 2), (ZeRO3, 3)])
def test_traffic_matches_ring_cost(ranks_of, S, mult, N):
    comm = ranks_of(N)
    if comm is None:
        return
    m = MLP()
    s = S(m, comm)
    rng = np.random.default_rng(comm.rank)
    batch = (rng.standard_normal((4, 64)).astype(np.float32), rng.standard_normal((4, 64)).astype(np.float32))
    s.step(batch)
    unit = m.n_params * 4  # the communicated dtype
    got = s.bytes_comm_per_rank() / unit
    assert got == pytest.approx(mult * (N - 1) / N)


@pytest.mark.mpi
@pytest.mark.parametrize("S", list(PREDICTED))
def test_an_mpi4py_communicator_is_wrapped(S):
    from mpi4py import MPI

    part = MPI.COMM_WORLD.Split(0, -MPI.COMM_WORLD.rank)
    s = S(MLP((7, 5, 3)), part)
    assert s.comm.size == part.size and s.comm.rank == part.rank
    loss = s.step((np.ones((2, 7), np.float32), np.zeros((2, 3), np.float32)))
    assert loss > 0
    part.Free()


@pytest.mark.mpi
def test_the_names_of_the_spec_stand():
    assert [S.name for S in SCHEMES] == ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert list(SCHEMES) == [DP, ZeRO1, ZeRO2, ZeRO3]
    assert MLP().n_params == 33088 and MLP((3, 2)).n_params == 8
