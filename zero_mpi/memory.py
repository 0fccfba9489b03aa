"""Ledger: the bytes alive and their peak, by kind, measured on arrays that exist.

Not for: predicting (formulas.py), nor for the memory of Python itself.
"""

import ctypes
import gc
import os
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# What lives as long as the scheme. Every other kind is transient.
BANDS = ("params", "grads", "optimizer")

# A cache line, and the widest vector register: BLAS may take another path, and so give other bits, on
# buffers that are aligned differently.
ALIGNMENT_BYTES = 64

# What glibc's mallopt is told: from how many bytes on an array gets a mapping of its own (the most there is),
# and at how many free ones the end of the heap is given back (as good as never). The second alone would be
# worse than neither: glibc then no longer raises the first.
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
_MALLOPT = {M_MMAP_THRESHOLD: 32 * 2**20, M_TRIM_THRESHOLD: 2**31 - 1}


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed for the next array; return whether it does. Local.

    Without it glibc hands units that are freed back to the system, or not, as what else lies in the heap has
    it: a step of ZeRO-3 then zeroes its gathered units' pages anew, a fifth of its time. Peaks stay as they
    are. Only where the C library is glibc, and for arrays below 32 MiB; who sets it in the environment has
    chosen.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in _MALLOPT.items())


def owner(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of `array`: a slice keeps its whole base alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Ledger:
    """Count the bytes of arrays by kind while they live, without keeping them alive.

    The ledger holds weak references to the owners of memory: dropping the last reference to an array, or to
    any view of it, is freeing. A view's own `nbytes` is never counted.
    """

    def __init__(self) -> None:
        self._alive: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._transients = 0
        self._transient_peak = 0
        self._total = 0
        self._total_peak = 0
        self._padding = 0
        self._entries: dict[int, weakref.ref] = {}

    def empty(self, kind: str, numel: int, dtype: np.dtype) -> np.ndarray:
        """Allocate an array of shape (numel,), aligned to 64 bytes and counted under `kind`.

        The few bytes that alignment costs are counted apart, in `padding_bytes`.
        """
        nbytes = int(numel) * np.dtype(dtype).itemsize
        raw = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT_BYTES
        self._enter(kind, raw, nbytes)
        return raw[offset : offset + nbytes].view(dtype)

    def track(self, kind: str, array: np.ndarray) -> np.ndarray:
        """Count the owner of `array` under `kind` until it is freed, and return `array` itself."""
        base = owner(array)
        if id(base) not in self._entries:
            self._enter(kind, base, base.nbytes)
        return array

    def alive_bytes(self, *kinds: str) -> int:
        """Return the bytes alive now, of the kinds named."""
        return sum(self._alive.get(kind, 0) for kind in kinds)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the three bands alive now."""
        return self.alive_bytes(*BANDS)

    @property
    def transient_bytes(self) -> int:
        """Bytes alive now that are no band: between steps there are none."""
        return self._transients

    @property
    def padding_bytes(self) -> int:
        """Bytes alive now that only serve alignment."""
        return self._padding

    @property
    def total_bytes(self) -> int:
        """All bytes alive now: bands, transients and padding."""
        return self._total

    @property
    def transient_peak_bytes(self) -> int:
        """Peak of all transient kinds together since construction or `reset_peaks`."""
        return self._transient_peak

    @property
    def total_peak_bytes(self) -> int:
        """Peak of all bytes together since construction or `reset_peaks`."""
        return self._total_peak

    def peak_bytes(self, kind: str) -> int:
        """Return the peak of one kind since construction or `reset_peaks`."""
        return self._peak.get(kind, 0)

    def transient_peaks(self) -> dict[str, int]:
        """Return the peak in bytes of each transient kind that was ever alive, in alphabetical order."""
        return {kind: self._peak[kind] for kind in sorted(self._peak) if kind not in BANDS}

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is alive now."""
        self._peak = dict(self._alive)
        self._transient_peak = self.transient_bytes
        self._total_peak = self.total_bytes

    def _enter(self, kind: str, base: np.ndarray, nbytes: int) -> None:
        key, total = id(base), base.nbytes
        transient = 0 if kind in BANDS else nbytes

        def leave(_: weakref.ref) -> None:
            del self._entries[key]
            self._alive[kind] -= nbytes
            self._transients -= transient
            self._total -= total
            self._padding -= total - nbytes

        self._entries[key] = weakref.ref(base, leave)
        self._alive[kind] = self._alive.get(kind, 0) + nbytes
        self._transients += transient
        self._total += total
        self._padding += total - nbytes
        self._peak[kind] = max(self._peak.get(kind, 0), self._alive[kind])
        self._transient_peak = max(self._transient_peak, self._transients)
        self._total_peak = max(self._total_peak, self._total)


class AuditFinding(NamedTuple):
    """What Python's allocator saw beside the ledger, in bytes."""

    resident_outside_bytes: int
    peak_outside_bytes: int
    largest: str


class Audit:
    """Compare a ledger with Python's own allocator (tracemalloc, which sees numpy's buffers).

    Start it before the scheme is built, call `begin` before the step to audit, `checkpoint` at points within
    it, and `finding` after. Between two checkpoints the peaks of both are compared, so an array that is
    hidden where the step needs little memory is seen too. tracemalloc slows a process down; an audit is a run
    of its own.
    """

    def __init__(self) -> None:
        gc.collect()
        tracemalloc.start(1)
        self._others_bytes = 0
        self._peak_outside_bytes = 0

    def begin(self, ledger: Ledger) -> None:
        """Start the peaks anew; what is alive and not numpy's is the zero they are compared from."""
        gc.collect()
        self._others_bytes = tracemalloc.get_traced_memory()[0] - self._numpy_bytes()
        self._peak_outside_bytes = 0
        ledger.reset_peaks()
        tracemalloc.reset_peak()

    def checkpoint(self, ledger: Ledger) -> None:
        """Compare the peaks since the last checkpoint, and start them anew."""
        peak = tracemalloc.get_traced_memory()[1] - self._others_bytes
        self._peak_outside_bytes = max(self._peak_outside_bytes, peak - ledger.total_peak_bytes)
        ledger.reset_peaks()
        tracemalloc.reset_peak()

    def watch(self, scheme: Any, names: Sequence[str], ledger: Ledger) -> None:
        """Make a checkpoint of the end of each call to the methods named."""

        def watched(method: Callable) -> Callable:
            def call(*args: Any) -> Any:
                result = method(*args)
                self.checkpoint(ledger)
                return result

            return call

        for name in names:
            setattr(scheme, name, watched(getattr(scheme, name)))

    def finding(self, ledger: Ledger) -> AuditFinding:
        """Return the bytes alive and at the peak that the ledger does not know; end the audit.

        The resident part is exact, from the allocations in numpy's own domain. The peak is of all of Python,
        so interpreter objects made during the step are in it: some tens of KiB.
        """
        self.checkpoint(ledger)
        resident = self._numpy_bytes() - ledger.total_bytes
        largest = self._largest()
        tracemalloc.stop()
        return AuditFinding(resident, self._peak_outside_bytes, largest)

    @staticmethod
    def _snapshot() -> tracemalloc.Snapshot:
        domain = np.lib.tracemalloc_domain
        return tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, domain)])

    def _numpy_bytes(self) -> int:
        return sum(trace.size for trace in self._snapshot().traces)

    def _largest(self) -> str:
        """Return where the most bytes were allocated that are not the ledger's own."""
        elsewhere = self._snapshot().filter_traces([tracemalloc.Filter(False, __file__)])
        lines = elsewhere.statistics("lineno")
        return str(lines[0]) if lines else "nothing"
