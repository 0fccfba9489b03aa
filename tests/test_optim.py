"""Adam: against the textbook in float64, against itself cut anywhere."""

import numpy as np
import pytest

from zero_mpi.optim import PIECE, Adam


def textbook(theta, grads, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8):
    """Run algorithm 1 of Kingma and Ba 2015 in float64."""
    theta, m, v = theta.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(grads, 1):
        g = g.astype(np.float64)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        theta = theta - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + eps)
    return theta


def run(theta, grads, cut=()):
    theta = theta.copy()
    state = {slot: np.zeros_like(theta) for slot in Adam.slots}
    edges = [0, *cut, theta.size]
    for t, g in enumerate(grads, 1):
        for lo, hi in zip(edges, edges[1:], strict=False):
            part = {slot: array[lo:hi] for slot, array in state.items()}
            Adam().update(theta[lo:hi], g[lo:hi], part, t)
    return theta, state


def problem(n, steps=20, dtype=np.float32):
    rng = np.random.default_rng(3)
    theta = rng.standard_normal(n).astype(np.float32)
    return theta, [rng.standard_normal(n).astype(dtype) for _ in range(steps)]


def test_adam_follows_the_textbook():
    theta, grads = problem(1000)
    # Float32 carries 24 bits: twenty steps of 0.01 leave an error of a few units in 1e-7.
    np.testing.assert_allclose(run(theta, grads)[0], textbook(theta, grads), rtol=0, atol=2e-6)


def test_the_first_steps_from_zero_have_six_digits():
    # 1 - float32(0.999) instead of float32(1 - 0.999) is wrong in the fifth.
    _, grads = problem(1000, steps=3)
    zero = np.zeros(1000, np.float32)
    for t in (1, 2, 3):
        np.testing.assert_allclose(run(zero, grads[:t])[0], textbook(zero, grads[:t]), rtol=2e-6, atol=1e-8)


def test_cutting_a_vector_changes_no_bit():
    theta, grads = problem(PIECE + 77)
    whole, state = run(theta, grads, ())
    for cut in [(1,), (PIECE,), (5, 5, 100, PIECE + 1)]:
        parts, part_state = run(theta, grads, cut)
        assert parts.tobytes() == whole.tobytes()
        assert all(part_state[s].tobytes() == state[s].tobytes() for s in Adam.slots)


def test_a_sixteen_bit_gradient_is_read_widened():
    theta, grads = problem(100, dtype=np.float16)
    wide = run(theta, [g.astype(np.float32) for g in grads])[0]
    assert run(theta, grads)[0].tobytes() == wide.tobytes()


def test_scale_multiplies_the_gradient():
    theta, (g,) = problem(100, steps=1)
    a, b = theta.copy(), theta.copy()
    state = [{slot: np.zeros_like(theta) for slot in Adam.slots} for _ in range(2)]
    Adam().update(a, g, state[0], 1, scale=0.25)
    Adam().update(b, g * np.float32(0.25), state[1], 1)
    assert a.tobytes() == b.tobytes()


def test_an_empty_shard_is_nothing_to_do():
    theta, state = run(np.empty(0, np.float32), [np.empty(0, np.float32)])
    assert theta.size == 0


@pytest.mark.parametrize("bad", [{"lr": 0}, {"lr": float("nan")}, {"beta1": 1}, {"beta2": -0.1}, {"eps": 0}])
def test_values_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}: expected"):
        Adam(**bad)


def test_the_smallest_eps_is_one_that_a_gradient_of_zeros_can_be_divided_by():
    with pytest.raises(ValueError) as refused:
        Adam(eps=1e-45)
    least = float(str(refused.value).split()[5])
    theta = np.ones(3, np.float32)
    state = {slot: np.zeros(3, np.float32) for slot in Adam.slots}
    Adam(eps=least).update(theta, np.zeros(3, np.float32), state, 1)
    assert (theta == 1).all()
