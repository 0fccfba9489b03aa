"""Whether a run can fit: the bytes it surely needs against the memory of the hosts it runs on.

Not for: what a run really takes; that is more, and is measured (memory.py).
"""

import os
from collections.abc import Sequence

from . import formulas
from .checks import itemsizes
from .run import Settings
from .schemes import SCHEMES, Scheme


def physical_bytes() -> int:
    """Return the bytes of memory this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def batch_bytes(dims: Sequence[int], rows: int, drawn_for: int) -> int:
    """Return the bytes of the activations that `rows` rows need until backward, and of the rows in a step.

    Parameters
    ----------
    dims : widths of an MLP. drawn_for : batches that each rank draws, one for each rank and micro-batch; 0
        where rows come from a file.
    """
    return 4 * rows * (sum(dims) + drawn_for * (dims[0] + dims[-1]))


def least_bytes(
    settings: Settings, schemes: Sequence[type[Scheme]], size: int, of_batch: int
) -> tuple[int, int]:
    """Return the least bytes of each of `size` ranks, and of the replay that rank 0 adds.

    That is the three bands of all schemes, which are trained side by side, one unit's gradient, and what the
    caller says of the batch; the replay keeps weights, and of what is trained the optimizer's state and a
    gradient of each rank.
    """
    units, job = settings.model.units, settings.training
    trained = [numel for u, numel in enumerate(units) if u not in job.freeze]
    n_params = sum(units)
    items = itemsizes(settings.precision, settings.optimizer)
    work = formulas.Workload(tuple(units), items, size, job.accumulate, job.reduce_every, tuple(job.freeze))
    bands = sum(formulas.bytes_per_param(SCHEMES[S], work) for S in schemes)
    rank = int(bands * n_params) + 4 * max(trained) + of_batch
    state = 4 * len(settings.optimizer.slots) + size * items.grads
    return rank, 4 * n_params + state * sum(trained) if settings.reference else 0


def refuse_what_cannot_fit(
    settings: Settings,
    schemes: Sequence[type[Scheme]],
    hosts: Sequence[str],
    rank: int,
    of_batch: int,
    have_bytes: int,
    advice: str,
) -> None:
    """Raise ValueError if the run needs more memory than the host of `rank` has. Local.

    Parameters
    ----------
    schemes : all that are alive at once. hosts : of each rank of the job; the run takes as many as its ranks
        are. of_batch : bytes (`batch_bytes`). have_bytes : of this host. advice : what to take instead.
    """
    here = sum(host == hosts[rank] for host in hosts)
    each, replay = least_bytes(settings, schemes, len(hosts), of_batch)
    needed = here * each + (replay if hosts[0] == hosts[rank] else 0)
    ranks = "1 rank" if here == 1 else f"{here} ranks"
    refuse_more_than_fits(
        "memory: expected a run", needed, hosts[rank], have_bytes, f", for {ranks}; take {advice}"
    )


def refuse_more_than_fits(expected: str, needed: int, host: str, have_bytes: int, rest: str = "") -> None:
    """Raise ValueError if `needed` bytes are more than `host` has; `expected` and `rest` frame the words."""
    if needed > have_bytes:
        raise ValueError(
            f"{expected} that fits into the {have_bytes} B of host {host}, "
            f"got one that needs at least {needed} B there{rest}"
        )
