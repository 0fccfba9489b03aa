"""The digest adds up over any blocks and sees one bit, a swap, a move."""

import numpy as np
import pytest

from zero_mpi.digest import digest


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("cut", [[], [1], [0, 3, 70000], [65536]])
def test_blocks_add_up_to_the_whole(dtype, cut):
    x = np.random.default_rng(0).standard_normal(100_000).astype(dtype)
    edges = [0, *cut, x.size]
    parts = sum(digest(x[a:b], a) for a, b in zip(edges, edges[1:], strict=False))
    assert parts % 2**64 == digest(x)


def test_one_bit_a_swap_and_another_unit_are_seen():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    flipped, swapped = x.copy(), x.copy()
    flipped.view(np.uint32)[500] ^= 1
    swapped[[3, 4]] = swapped[[4, 3]]
    seen = {digest(x), digest(flipped), digest(swapped), digest(x, unit=1), digest(x, start=1)}
    assert len(seen) == 5


def test_zeros_are_not_nothing():
    assert digest(np.zeros(3, np.float32)) != digest(np.zeros(4, np.float32)) != 0
    assert digest(np.zeros(1, np.float32)) != digest(-np.zeros(1, np.float32))
