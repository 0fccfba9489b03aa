"""PyTorch as an oracle, where it is installed: gradients, optimizers, clipping, schedule; compare_torch.py.

All oracles are in float64: what differs is our float32.
"""

import json
import math
import sys

import numpy as np
import pytest
from conftest import ROOT
from helpers import named
from test_model import loss_and_gradient
from threadworld import run_ranks

from zero_mpi import certificate
from zero_mpi.data import SeedStream
from zero_mpi.model import MLP
from zero_mpi.optim import SGD, Adam
from zero_mpi.schemes import SCHEMES
from zero_mpi.training import Schedule, Training
from zero_mpi.transport import launched_size

if launched_size() > 1:
    # An import of torch takes seconds and 200 MB a rank.
    pytest.skip(
        "one process is enough for an oracle: runs in plain pytest, if installed", allow_module_level=True
    )
torch = pytest.importorskip("torch", reason="torch is not installed (pip install torch): no oracle")

EPS = float(np.finfo(np.float32).eps)
DIMS = [(7, 5, 3), (64, 128, 128, 64), (4, 6), (3, 8, 8, 2)]


def autograd(model, units, x, y):
    """Return the loss and the gradient of each unit, float64."""
    leaves = [torch.tensor(unit, dtype=torch.float64, requires_grad=True) for unit in units]
    h = torch.tensor(x, dtype=torch.float64)
    for u, leaf in enumerate(leaves):
        (_, shape), _ = model.tensors(u)
        weights, bias = leaf[: math.prod(shape)].reshape(shape), leaf[math.prod(shape) :]
        h = (torch.relu(h) if u else h) @ weights + bias
    loss = torch.nn.functional.mse_loss(h, torch.tensor(y, dtype=torch.float64))
    loss.backward()
    return loss.item(), [leaf.grad.numpy() for leaf in leaves]


def problem(dims, rows=8):
    model = MLP(dims)
    batch = next(SeedStream(7, rows, dims[0], dims[-1]).global_batches(1))[0][0]
    return model, list(model.init(5)), *batch


@pytest.mark.parametrize("dims", DIMS)
def test_gradients_in_float64_are_autograds(dims):
    model, units, x, y = problem(dims)
    units, x, y = [unit.astype(np.float64) for unit in units], x.astype(np.float64), y.astype(np.float64)
    loss, gradients = loss_and_gradient(model, units, x, y)
    expected_loss, expected = autograd(model, units, x, y)
    assert loss == pytest.approx(expected_loss, rel=1e-14)
    for ours, theirs in zip(gradients, expected, strict=True):
        # The factor 2 / y.size is a float32 in our loss: off by at most half an eps of its size.
        np.testing.assert_allclose(ours, theirs, rtol=0.6 * EPS, atol=1e-14)


@pytest.mark.parametrize("dims", DIMS)
def test_gradients_in_float32_are_autograds_but_for_rounding(dims):
    model, units, x, y = problem(dims)
    loss, gradients = loss_and_gradient(model, units, x, y)
    expected_loss, expected = autograd(model, units, x, y)
    # A chain of n additions is off by at most n eps of the terms' size (Higham 2002, sec. 4.2): through all
    # layers, back again, and over rows.
    n = sum(dims[:-1]) + sum(dims[1:]) + len(x)
    assert loss == pytest.approx(expected_loss, rel=n * EPS)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=n * EPS * np.abs(theirs).max())


OPTIMIZERS = [
    (Adam(), lambda p: torch.optim.Adam(p, lr=1e-2)),
    (Adam(lr=3e-3, beta1=0.8, beta2=0.99, eps=1e-6), None),
    (Adam(weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    (SGD(lr=0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
    (SGD(lr=0.05, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
]


@pytest.mark.parametrize(("ours", "theirs"), OPTIMIZERS, ids=lambda x: getattr(x, "describe", str)())
def test_an_optimizer_takes_the_steps_of_pytorchs(ours, theirs):
    if theirs is None:
        betas = (ours.beta1, ours.beta2)
        theirs = lambda p: torch.optim.Adam(p, lr=ours.lr, betas=betas, eps=ours.eps)  # noqa: E731
    rng = np.random.default_rng(3)
    theta = rng.standard_normal(1000).astype(np.float32)
    leaf = torch.tensor(theta, dtype=torch.float64, requires_grad=True)
    optimizer = theirs([leaf])
    state = {slot: np.zeros_like(theta) for slot in ours.slots}
    for step in range(1, 21):
        # Of every size: where a gradient is near eps, eps in another place would show.
        grad = (rng.standard_normal(1000) * 10.0 ** rng.integers(-9, 1, 1000)).astype(np.float32)
        ours.update(theta, grad, state, step)
        leaf.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        # A step rounds theta, below 4 here, by at most an eps of it; the step itself is far smaller.
        np.testing.assert_allclose(theta, leaf.detach().numpy(), rtol=0, atol=4 * step * EPS)


@pytest.mark.parametrize("limit", [0.01, 1e3])
@pytest.mark.parametrize("S", SCHEMES, ids=lambda S: S.key)
def test_clipping_is_pytorchs(S, limit):
    size, rows, model = 3, 4, MLP((7, 5, 3))
    batches = next(SeedStream(7, rows, 7, 3).global_batches(size))

    def train(comm):
        scheme = S(
            model, comm, precision=named("fp32"), optimizer=SGD(lr=1.0), training=Training(clip_norm=limit)
        )
        scheme.step(*batches[comm.rank])
        return scheme.grad_norm, scheme.full_theta()

    norm, theta = run_ranks(size, train)[0]
    units = list(model.init(0))
    x, y = (np.concatenate([batches[rank][0][i] for rank in range(size)]) for i in (0, 1))
    leaves = []
    for unit, grad in zip(units, autograd(model, units, x, y)[1], strict=True):
        leaves.append(torch.tensor(unit, dtype=torch.float64, requires_grad=True))
        leaves[-1].grad = torch.tensor(grad)
    expected = torch.nn.utils.clip_grad_norm_(leaves, limit).item()
    torch.optim.SGD(leaves, lr=1.0).step()
    # Sums of 7 + 5 + 3 + 12 terms in float32; and PyTorch divides by the norm + 1e-6.
    assert norm == pytest.approx(expected, rel=27 * EPS)
    np.testing.assert_allclose(
        theta, np.concatenate([leaf.detach() for leaf in leaves]), rtol=0, atol=limit * 1e-6 + 27 * EPS
    )


@pytest.mark.parametrize(("warmup", "updates"), [(0, 10), (4, 20), (5, 6)])
def test_the_cosine_with_warm_up_is_the_formula_and_pytorchs(warmup, updates):
    schedule = Schedule("cosine", warmup, updates)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    parts = torch.optim.lr_scheduler
    decay = parts.CosineAnnealingLR(optimizer, updates - warmup)
    chained = decay
    if warmup:
        rise = parts.LinearLR(optimizer, 1 / warmup, 1.0, max(1, warmup - 1))
        chained = parts.SequentialLR(optimizer, [rise, decay], [warmup])
    for update in range(1, updates + 1):
        expected = update / warmup if update <= warmup else None
        if expected is None:
            expected = (1 + math.cos(math.pi * (update - 1 - warmup) / (updates - warmup))) / 2
        assert schedule.factor(update) == pytest.approx(expected, abs=1e-12)
        assert schedule.factor(update) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        chained.step()


def torch_run(steps, seed=0, spoil=None):
    """Train with PyTorch alone, as anyone would, and return the certificate of the run."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    chain = certificate.Chain(units=[p.numel() for p in net.parameters()])
    chain.append(0, params=[p.detach().numpy() for p in net.parameters()])
    x, y = torch.randn(8, 6), torch.randn(8, 2)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        if step == spoil:
            bias = net[2].bias.grad.numpy().view(np.uint32)
            bias[1] ^= 1
        optimizer.step()
        chain.append(
            step,
            grads=[p.grad.numpy() for p in net.parameters()],
            params=[p.detach().numpy() for p in net.parameters()],
            loss=loss.item(),
        )
    return certificate.document({"mine": chain}, {"model": "a net of mine"})


def compared(tmp_path, *documents):
    for i, document in enumerate(documents):
        (tmp_path / f"{i}.json").write_text(json.dumps(document))
    (found,) = certificate.compare(*(certificate.read(tmp_path / f"{i}.json") for i in (0, 1)))
    return found


def test_a_loop_of_pytorchs_certifies_its_steps(tmp_path):
    assert compared(tmp_path, torch_run(4), torch_run(4)).same_steps == 5


def test_one_bit_of_one_gradient_of_pytorchs_is_found(tmp_path):
    found = compared(tmp_path, torch_run(4), torch_run(4, spoil=3))
    assert (found.step, found.phase, found.unit) == (3, "gradient", 3)


def test_other_initial_weights_of_pytorchs_are_found(tmp_path):
    assert compared(tmp_path, torch_run(2), torch_run(2, seed=1)).cause == "different initial weights"


# The script.

SMALL = ("--dims", "17,33,12", "--steps", "3", "--batch", "5")


@pytest.mark.launches
@pytest.mark.parametrize(("ranks", "scheme"), [(1, "dp"), (2, "zero1"), (3, "zero3")])
def test_the_script_explains_every_difference(launch, tmp_path, ranks, scheme):
    paths = [tmp_path / name for name in ("found.json", "ours.json", "theirs.json")]
    job = launch(
        ranks,
        "scripts/compare_torch.py",
        *SMALL,
        *("--scheme", scheme, "--json", paths[0], "--certificate", *paths[1:]),
    )
    assert job.code == 0, job.out + job.err
    # The files' names are as long as they are.
    assert [line for line in job.out.splitlines() if len(line) > 80 and str(tmp_path) not in line] == []
    found = json.loads(paths[0].read_text())
    assert found["schema"] == "zero_mpi.compare_torch/1"
    assert found["unexplained"] == [] and found["replayed_steps"] == len(found["steps"]) == 3
    for step in found["steps"]:
        assert step["loss_ours"] == pytest.approx(step["loss_torch"], rel=1e-5)
    sources = found["sources"]
    # With our products and sums, nothing is left of the gradient's difference.
    assert [step["share"] for step in sources["autograd"]["steps"]] == [0, 0, 0]
    # Two terms have one order, one has none.
    assert sources["ranks"]["classes"] == (["summation order"] if ranks == 3 else ["-"])
    assert sources["adam"]["classes"] == ["rounding"]
    mistakes = [mistake["class"] for mistake in found["mistakes"]]
    more = ["missing contribution", "divisor or scale"] if ranks > 1 else []
    assert mistakes == ["divisor or scale", *more, "stale"]
    assert min(mistake["largest"] for mistake in found["mistakes"]) > 1e3 * max(
        source["steps"][0]["largest"] for source in sources.values()
    )
    (together,) = certificate.compare(*map(certificate.read, paths[1:]))
    # The same weights and the same rows, then not the same bits.
    assert together.step == 1 and together.phase in ("gradient", "parameters")


@pytest.fixture
def script(monkeypatch):
    """Return the script and PyTorch's side of it, as modules."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    import compare_torch
    import torch_side

    return compare_torch, torch_side


def explained(script, steps=2):
    """Return the script's Comparison of three ranks, in this process."""
    compare_torch, torch_side = script
    comparison = compare_torch.Comparison(compare_torch.parser().parse_args(SMALL), 3, torch_side)
    batches = SeedStream(7, 5, 17, 12).global_batches(3)
    for _ in range(steps):
        given, reference = next(batches), comparison.reference
        reference.step(given)
        comparison._explain(given, compare_torch._together(given))
    return comparison


def test_another_adam_is_no_rounding(script, monkeypatch):
    plain = script[1].Network.adam
    wrong = Adam(beta2=0.99)
    monkeypatch.setattr(script[1].Network, "adam", lambda net, ours: plain(net, wrong))
    assert "our gradient, its Adam" in explained(script).unexplained


def test_another_loss_is_no_rounding(script, monkeypatch):
    plain = script[1].Network.backward

    def off(net, batch, criterion=torch.nn.functional.l1_loss):
        return plain(net, batch, criterion)

    monkeypatch.setattr(script[1].Network, "backward", off)
    assert "all of these: its gradient" in explained(script).unexplained


def test_without_a_mistake_nothing_is_unexplained(script):
    assert explained(script).unexplained == []
