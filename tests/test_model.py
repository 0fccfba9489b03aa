"""The MLP: the spec's numbers, and gradients against finite differences."""

import numpy as np
import pytest

from zero_mpi.model import MLP


def test_the_default_is_the_specs():
    assert MLP().dims == (64, 128, 128, 64)
    assert MLP().n_params == 33088
    assert MLP().units == (8320, 16512, 8256)


def test_initial_weights_are_one_stream_layer_by_layer():
    rng = np.random.default_rng(0)
    for (i, o), theta in zip([(7, 5), (5, 3)], MLP((7, 5, 3)).init(0), strict=True):
        weights = (rng.standard_normal((i, o)) * np.sqrt(2 / i)).astype(np.float32)
        assert theta.dtype == np.float32
        assert np.array_equal(theta[: i * o].reshape(i, o), weights)
        assert not theta[i * o :].any() and theta.size == i * o + o


def loss_and_gradient(model, units, x, y):
    saved = []
    for u, params in enumerate(units):
        x, kept = model.forward(u, params, x)
        saved.append(kept)
    loss, dy = model.loss(x, y)
    gradients = [np.full_like(unit, np.nan) for unit in units]
    for u in reversed(range(len(units))):
        dy = model.backward(u, units[u], saved[u], dy, out=gradients[u])
    assert dy is None
    return loss, gradients


@pytest.mark.parametrize("dims", [(7, 5, 3), (4, 6), (1, 1), (3, 8, 8, 2)])
def test_gradients_are_the_finite_differences(dims):
    model, rng = MLP(dims), np.random.default_rng(1)
    x, y = rng.standard_normal((4, dims[0])), rng.standard_normal((4, dims[-1]))
    # In float64 a central difference of 1e-6 is good to about 1e-8.
    units = [u.astype(np.float64) + 0.01 * rng.standard_normal(u.size) for u in model.init(5)]
    _, gradients = loss_and_gradient(model, units, x, y)
    for u, unit in enumerate(units):
        for i in range(unit.size):
            kept, values = unit[i], []
            for step in (1e-6, -1e-6):
                unit[i] = kept + step
                values.append(loss_and_gradient(model, units, x, y)[0])
            unit[i] = kept
            assert gradients[u][i] == pytest.approx((values[0] - values[1]) / 2e-6, rel=2e-5, abs=2e-7)


def test_loss_is_the_mean_over_all_elements():
    loss, dy = MLP((2, 3)).loss(np.full((4, 3), 2, np.float32), np.zeros((4, 3), np.float32))
    assert loss == 4.0
    assert np.array_equal(dy, np.full((4, 3), 2 * 2 / 12, np.float32))


@pytest.mark.parametrize("dims", [(), (5,), (5, 0), (5, -1, 2), (2.5, 3)])
def test_impossible_widths_are_refused(dims):
    with pytest.raises(ValueError, match="^dims: expected"):
        MLP(dims)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_widths_of_numpys_integers_do_not_overflow(dtype):
    assert MLP(np.array([200, 250, 3], dtype)).units == (200 * 250 + 250, 753)
    assert MLP(np.array([50_000, 50_000], np.int32)).units == (2_500_050_000,)
    assert {type(d) for d in MLP(np.array([2, 3], dtype)).dims} == {int}
