"""What surely cannot fit: never more than a run really takes, and refused on the host that lacks it."""

import pytest
from helpers import M, settings
from threadworld import run_ranks

from zero_mpi.fit import batch_bytes, least_bytes, refuse_what_cannot_fit
from zero_mpi.schemes import DP, SCHEMES, ZeRO3


@pytest.mark.parametrize("precision", ["fp32", "mixed", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_least_is_what_the_bands_take_and_one_gradient(size, precision):
    def held(comm):
        schemes = [S(M, comm, precision=precision) for S in SCHEMES]
        return sum(scheme.ledger.resident_bytes for scheme in schemes)

    whole = sum(run_ranks(size, held))
    least, _ = least_bytes(settings(M, precision), list(SCHEMES), size, 0)
    # A mean over ranks, rounded down.
    assert 0 <= whole - size * (least - 4 * max(M.units)) < size


def test_the_replay_counts_where_there_is_one():
    with_replay = least_bytes(settings(), [DP], 3, 0)
    without = least_bytes(settings(reference=False), [DP], 3, 0)
    assert without == (with_replay[0], 0)
    # Weights and two moments in float32, and three float16 gradients.
    assert with_replay[1] == M.n_params * (12 + 3 * 2)


def test_a_host_is_asked_for_its_own_ranks_and_the_replay_where_rank_0_is():
    hosts = ["a", "b", "a"]
    each, replay = least_bytes(settings(), [DP, ZeRO3], 3, 100)
    for rank, needed, ranks in ((0, 2 * each + replay, "2 ranks"), (1, each, "1 rank")):
        refuse_what_cannot_fit(settings(), [DP, ZeRO3], hosts, rank, 100, needed, "")
        words = (
            f"the {needed - 1} B of host {hosts[rank]}, got one that needs at least {needed} B there, for "
        )
        with pytest.raises(ValueError, match=f"^memory: .*{words}{ranks}; take less$"):
            refuse_what_cannot_fit(settings(), [DP, ZeRO3], hosts, rank, 100, needed - 1, "less")


def test_the_bytes_of_a_batch_are_its_activations_and_the_rows_of_all_who_are_drawn_for():
    assert batch_bytes((7, 5, 3), 2, 0) == 4 * 2 * 15
    assert batch_bytes((7, 5, 3), 2, 4) == 4 * (2 * 15 + 4 * 2 * (7 + 3))
