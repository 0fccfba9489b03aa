"""The communicator over threads: labels, agreements and mistakes; what needs MPI itself is in test_mpi.py."""

import numpy as np
import pytest
from threadworld import run_ranks

from zero_mpi.comm import MAX_MESSAGE_BYTES, OutOfStep, SharedMistake


def test_collectives_stand_inside_each_other():
    def work(comm):
        x, other = np.ones(3, np.uint8), 1 - comm.rank

        def send():
            comm.sendrecv(x, other, np.empty_like(x), other)

        send()
        with comm.collective("all-gather"):
            send()
            with comm.collective("control", kind="control"):
                send()
                with comm.collective("all-gather"):
                    send()
                send()
            send()
        send()
        return [
            comm.traffic.total(collective=name).sent_messages
            for name in ("point-to-point", "all-gather", "control")
        ]

    assert run_ranks(2, work) == [[2, 3, 2]] * 2


def test_a_collective_that_comes_again_counts_where_the_count_now_is():
    def work(comm):
        x, other, counts = np.ones(3, np.uint8), 1 - comm.rank, []
        for _ in range(3):
            comm.traffic = type(comm.traffic)()
            with comm.collective("all-gather"):
                comm.sendrecv(x, other, np.empty_like(x), other)
            counts.append(comm.traffic)
        return [count.total(collective="all-gather").sent_bytes for count in counts]

    assert run_ranks(2, work) == [[3, 3, 3]] * 2


@pytest.mark.parametrize("apart", [1, 2, 4000, 7999])
def test_units_are_told_apart(apart):
    def work(comm):
        comm.unit = apart * comm.rank
        x = np.ones(4, np.float32)
        words = rf"unit (0|{apart}), rank \d at .* unit (0|{apart})$"
        with comm.collective("all-gather"), pytest.raises(OutOfStep, match=words):
            comm.sendrecv(x, 1 - comm.rank, np.empty_like(x), 1 - comm.rank)

    run_ranks(2, work)


def test_a_setting_that_one_rank_alone_has_is_a_difference():
    def work(comm):
        with pytest.raises(SharedMistake, match="extra: expected the same on every rank, got None on rank 0"):
            comm.agree(a=1, **({"extra": 2} if comm.rank == 1 else {}))

    run_ranks(2, work)


@pytest.mark.parametrize("error", [ValueError, TypeError, OSError, MemoryError])
def test_a_mistake_of_one_rank_is_everyones(error):
    def work(comm):
        with pytest.raises(SharedMistake, match=error.__name__), comm.together():
            if comm.rank == 1:
                raise error

    run_ranks(2, work)


def test_messages_are_short_enough_for_any_library():
    # Counts are C ints, and some libraries fail at exactly 2^31.
    assert MAX_MESSAGE_BYTES < 2**31
