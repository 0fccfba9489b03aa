"""PyTorch's side of compare_torch.py: our MLP as PyTorch has it, its gradients and its Adam, in one process.

Not for: starting by hand. Needs torch; only rank 0 imports it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from zero_mpi.data import Batch
from zero_mpi.memory import Ledger
from zero_mpi.model import MLP
from zero_mpi.optim import Adam

# One thread, as each of our ranks: a product must not depend on how many share it.
torch.set_num_threads(1)


class _NumpyProduct(torch.autograd.Function):
    """``x @ weight.T``, and both products of its backward, by numpy as in our MLP."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Aligned as the schemes' units are: BLAS may give other bits elsewhere.
        ours = Ledger().empty("weights", weight.numel(), np.dtype(np.float32)).reshape(weight.shape[::-1])
        ours[...] = weight.detach().numpy().T
        ctx.x, ctx.weights = x.detach().numpy(), ours
        return torch.from_numpy(ctx.x @ ours)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dy = np.ascontiguousarray(grad.numpy())
        dx, d_weights = (ctx.weights @ dy.T).T, ctx.x.T @ dy
        return torch.from_numpy(np.ascontiguousarray(dx)), torch.from_numpy(np.ascontiguousarray(d_weights.T))


class _NumpySum(torch.autograd.Function):
    """``y + bias``, whose gradient numpy adds up over rows as in our MLP."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return y + bias

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, torch.from_numpy(np.sum(np.ascontiguousarray(grad.numpy()), axis=0))


class _Linear(nn.Linear):
    """nn.Linear, with what `by_numpy` names done by numpy: "products" of matrices, "sums" over rows."""

    by_numpy: Sequence[str] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_numpy:
            return super().forward(x)
        weight = self.weight
        y = _NumpyProduct.apply(x, weight) if "products" in self.by_numpy else x @ weight.T
        return _NumpySum.apply(y, self.bias) if "sums" in self.by_numpy else y + self.bias


class Network:
    """Our MLP as nn.Linear layers with ReLU between them, one for each unit.

    Parameters
    ----------
    model : whose widths it has. dtype : of its parameters.
    by_numpy : what numpy does in place of PyTorch, of "products" of matrices and "sums" over rows.
    """

    def __init__(
        self, model: MLP, dtype: torch.dtype = torch.float32, *, by_numpy: Sequence[str] = ()
    ) -> None:
        pairs = zip(model.dims, model.dims[1:], strict=False)
        self.linears = [_Linear(fan_in, fan_out, dtype=dtype) for fan_in, fan_out in pairs]
        layers: list[nn.Module] = []
        for linear in self.linears:
            linear.by_numpy = by_numpy
            layers += [nn.ReLU(), linear] if layers else [linear]
        self.module, self.dtype = nn.Sequential(*layers), dtype

    def load(self, units: Sequence[np.ndarray]) -> None:
        """Copy our units in. PyTorch keeps a weight as (fan_out, fan_in), the transpose of ours."""
        with torch.no_grad():
            for linear, unit in zip(self.linears, units, strict=True):
                weight, bias = _parts(linear, unit)
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)

    def units(self) -> list[np.ndarray]:
        """Return the parameters as our units, copies."""
        return [_unit(linear.weight.detach(), linear.bias.detach()) for linear in self.linears]

    def grads(self) -> list[np.ndarray]:
        """Return the gradient of the last backward as our units, copies."""
        return [_unit(linear.weight.grad, linear.bias.grad) for linear in self.linears]

    def backward(self, batch: Batch, criterion: Callable = nn.functional.mse_loss) -> float:
        """Run forward and backward on `batch`; return the loss."""
        self.module.zero_grad()
        x, y = (torch.from_numpy(array).to(self.dtype) for array in batch)
        loss = criterion(self.module(x), y)
        loss.backward()
        return loss.item()

    def adam(self, ours: Adam) -> torch.optim.Adam:
        """Return PyTorch's Adam with the numbers of ours, as its users get it."""
        betas = (ours.beta1, ours.beta2)
        return torch.optim.Adam(self.module.parameters(), lr=ours.lr, betas=betas, eps=ours.eps)

    def update(
        self,
        ours: Adam,
        theta: Sequence[np.ndarray],
        grads: Sequence[np.ndarray],
        m: Sequence[np.ndarray],
        v: Sequence[np.ndarray],
        step: int,
    ) -> list[np.ndarray]:
        """Return the units that PyTorch's Adam makes of these, all given as our units, in update `step`."""
        self.load(theta)
        optimizer = self.adam(ours)
        for linear, *given in zip(self.linears, grads, m, v, strict=True):
            of_weight, of_bias = zip(*(_parts(linear, unit) for unit in given), strict=True)
            for p, (grad, mean, square) in ((linear.weight, of_weight), (linear.bias, of_bias)):
                p.grad = grad
                state = {"exp_avg": mean, "exp_avg_sq": square}
                optimizer.state[p] = {"step": torch.tensor(float(step - 1)), **state}
        optimizer.step()
        return self.units()


def mean_over_rows(y_hat: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the squares added up over columns, and their mean over rows only: a mistake to plant."""
    return ((y_hat - y) ** 2).sum(dim=1).mean()


def mean_in_rank_order(gradients: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return the mean over ranks of ``gradients[rank][u]``, added up by PyTorch in rank order."""
    means = []
    for unit in zip(*gradients, strict=True):
        total = torch.from_numpy(unit[0].copy())
        for gradient in unit[1:]:
            total += torch.from_numpy(gradient)
        means.append((total / len(gradients)).numpy())
    return means


def root(x: np.ndarray) -> np.ndarray:
    """Return PyTorch's square root of each element."""
    return torch.from_numpy(x).sqrt().numpy()


def describe() -> str:
    """Return the words for this PyTorch."""
    return f"PyTorch {torch.__version__}" + (", MKL" if torch.backends.mkl.is_available() else "")


def _unit(weight: torch.Tensor, bias: torch.Tensor) -> np.ndarray:
    return torch.cat([weight.T.reshape(-1), bias]).numpy()


def _parts(linear: nn.Linear, unit: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight and the bias in one of our units, contiguous copies of PyTorch's shapes."""
    whole, numel = torch.tensor(unit), linear.weight.numel()
    return whole[:numel].reshape(linear.in_features, -1).T.contiguous(), whole[numel:].clone()
