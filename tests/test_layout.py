"""Blocks: pure integers, against numpy's own split."""

import numpy as np
import pytest

from zero_mpi.layout import Blocks


@pytest.mark.parametrize("numel", [0, 1, 2, 5, 18, 40, 41, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 33])
def test_blocks_cut_as_array_split_does(numel, count):
    blocks, x = Blocks(numel, count), np.arange(numel)
    for i, expected in enumerate(np.array_split(x, count)):
        assert np.array_equal(x[blocks.of(i)], expected)
        assert blocks.size(i) == expected.size == blocks.stop(i) - blocks.start(i)
        assert blocks.size(i) <= blocks.largest
    assert blocks.largest == blocks.size(0)
    assert blocks.slices() == [blocks.of(i) for i in range(count)]


def test_case_layout_of_two_parameters_on_four_ranks():
    assert [Blocks(2, 4).size(i) for i in range(4)] == [1, 1, 0, 0]


def test_case_layout_of_the_small_mlp_on_three_ranks():
    assert [[Blocks(n, 3).size(i) for i in range(3)] for n in (40, 18)] == [[14, 13, 13], [6, 6, 6]]


@pytest.mark.parametrize("numel, count", [(-1, 2), (3, 0), (3, -1)])
def test_impossible_blocks_are_refused(numel, count):
    with pytest.raises(ValueError, match="expected at least"):
        Blocks(numel, count)
