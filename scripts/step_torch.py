"""One rank of PyTorch's side of bench_step.py: DDP, ZeroRedundancyOptimizer and FSDP2 over gloo, on CPU.

Not for: starting by hand; bench_step.py does, and sets RANK, WORLD_SIZE and MEETING, a file
that the ranks find each other by.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero_mpi.data import SeedStream
from zero_mpi.model import MLP

# As in step_ours.py.
LR = 1e-3
WARM_UP = 3

# Adam in one kernel, and in one pass a line of its formula over all tensors; the plain loop is never faster.
FUSED, FOREACH = {"fused": True}, {"foreach": True}

Pair = tuple[nn.Module, torch.optim.Optimizer]


def network(dims: tuple[int, ...]) -> nn.Sequential:
    """Return our MLP as PyTorch has it, with the same initial weights."""
    layers: list[nn.Module] = []
    for u, theta in enumerate(MLP(dims).init()):
        linear = nn.Linear(dims[u], dims[u + 1])
        weights, bias = theta[: linear.weight.numel()], theta[linear.weight.numel() :]
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weights.reshape(dims[u], dims[u + 1]).T))
            linear.bias.copy_(torch.from_numpy(bias))
        layers += [nn.ReLU(), linear] if u else [linear]
    return nn.Sequential(*layers)


def ddp(dims: tuple[int, ...], adam: dict, **options: bool) -> Pair:
    """Return DDP and Adam."""
    model = DistributedDataParallel(network(dims), **options)
    return model, torch.optim.Adam(model.parameters(), lr=LR, **adam)


def zero1(dims: tuple[int, ...], adam: dict, views: bool) -> Pair:
    """Return DDP and Adam sharded by whole tensors."""
    model = DistributedDataParallel(network(dims), gradient_as_bucket_view=True, static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, parameters_as_bucket_view=views, lr=LR, **adam
    )
    return model, optimizer


def fsdp(dims: tuple[int, ...], adam: dict, reshard: bool) -> Pair:
    """Return FSDP2 with each layer a unit, as ours, and Adam; `reshard` after forward or not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network(dims)
    for module in [*(layer for layer in model if isinstance(layer, nn.Linear)), model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return model, torch.optim.Adam(model.parameters(), lr=LR, **adam)


def contestants(dims: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], Pair]]]:
    """Yield names ("kind: settings"), and what builds each: the settings that were the fastest anywhere."""
    for words, adam in (("fused", FUSED), ("foreach", FOREACH)):
        for views in (True, False):
            said = f"{words}, views" if views else words
            yield f"DDP: {said}", lambda a=adam, v=views: ddp(dims, a, gradient_as_bucket_view=v)
            yield (
                f"DDP: {said}, static",
                lambda a=adam, v=views: ddp(dims, a, gradient_as_bucket_view=v, static_graph=True),
            )
            yield f"ZeroRedundancyOptimizer: {said}", lambda a=adam, v=views: zero1(dims, a, v)
        yield f"FSDP2: {words}", lambda a=adam: fsdp(dims, a, reshard=False)
        yield f"FSDP2, resharding: {words}", lambda a=adam: fsdp(dims, a, reshard=True)


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, given: Iterator, steps: int) -> tuple:
    """Return the median time of `steps` steps in ms, and the losses of those before them."""

    def step() -> torch.Tensor:
        x, y = next(given)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    losses = [step().item() for _ in range(WARM_UP)]
    times_s = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s) * 1e3, losses


def over_ranks(ms: float, losses: list[float]) -> tuple[float, list[float]]:
    """Return the slowest rank's time, and the mean losses. Collective."""
    numbers = torch.tensor([ms, *losses], dtype=torch.float64)
    rows = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, numbers)
    table = torch.stack(rows)
    return table[:, 0].max().item(), table[:, 1:].mean(dim=0).tolist()


def main() -> None:
    """Time every contestant, and print all of it as JSON, on rank 0."""
    p = argparse.ArgumentParser()
    p.add_argument("--dims", type=lambda text: tuple(map(int, text.split(","))), required=True)
    p.add_argument("--rows", type=int, required=True)
    p.add_argument("--steps", type=int, required=True)
    args = p.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=size)
    stream = SeedStream(7, args.rows, args.dims[0], args.dims[-1]).global_batches(size)
    mine = [tuple(torch.from_numpy(array) for array in next(stream)[rank][0]) for _ in range(8)]
    found = {}
    for name, build in contestants(args.dims):
        model, optimizer = build()
        ms, losses = over_ranks(*timed(model, optimizer, itertools.cycle(mine), args.steps))
        found[name] = {"ms": ms, "losses": losses}
        del model, optimizer
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    # PyTorch's threads sometimes end the process with an abort when Python tears it down: all is said by now.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
