"""Precision: which dtype holds which, and rounding on the way."""

import builtins

import numpy as np
import pytest

from zero_mpi.precision import PIECE, Precision, all_finite, dtype_of, holds, round_through


def test_holding_is_exact():
    assert all(holds("float64", d) for d in ("float64", "float32", "float16", "bfloat16"))
    assert all(holds("float32", d) for d in ("float32", "float16", "bfloat16"))
    assert not holds("float16", "bfloat16") and not holds("bfloat16", "float16")
    assert not holds("float16", "float32") and not holds("bfloat16", "float32")


@pytest.mark.parametrize(
    "name, gather", [("fp32", "float16"), ("fp32", "bfloat16"), ("mixed", "bfloat16"), ("bf16", "float16")]
)
def test_a_gather_dtype_that_loses_bits_is_refused(name, gather):
    with pytest.raises(ValueError, match="gather dtype: expected one that holds .* exactly, got"):
        Precision.named(name, gather=gather)


def test_bfloat16_gradients_do_not_travel_in_float16():
    with pytest.raises(ValueError, match="range of bfloat16"):
        Precision.named("bf16", reduce="float16")


@pytest.mark.parametrize("name", ["fp16", "", "float32"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="expected one of"):
        Precision.named(name)


def test_bfloat16_without_its_package_names_the_extra(monkeypatch):
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "ml_dtypes":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"pip install 'zero_mpi\[bf16\]'"):
        Precision.named("bf16")


@pytest.mark.parametrize("through", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("into", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", [0, 5, PIECE + 3])
def test_rounding_on_the_way_is_two_casts(through, into, size):
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    out = np.empty(size, dtype_of(into))
    round_through(x, out, dtype_of(through))
    assert out.tobytes() == x.astype(dtype_of(through)).astype(dtype_of(into)).tobytes()


def test_rounding_in_place():
    x = np.random.default_rng(0).standard_normal(PIECE + 3).astype(np.float32)
    expected = x.astype(np.float16).astype(np.float32)
    round_through(x, x, np.dtype(np.float16))
    assert np.array_equal(x, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [1, 33, PIECE + 3])
def test_one_element_that_is_not_finite_is_found_and_large_ones_are_not(size, dtype):
    largest = np.finfo(dtype).max
    for place in {0, size // 2, size - 1}:
        x = np.random.default_rng(0).standard_normal(size).astype(dtype)
        for value in (largest, -largest, dtype_of(dtype).type("nan"), np.inf, -np.inf):
            x[place] = value
            assert all_finite(x) == bool(abs(value) <= largest)
    assert all_finite(np.full(size, largest, dtype)) and all_finite(np.empty(0, dtype))
