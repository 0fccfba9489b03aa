"""The ledger counts what lives, and a view keeps its whole base alive."""

import gc
import os
import platform
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from zero_mpi.memory import ALIGNMENT_BYTES, Audit, Ledger


@pytest.mark.parametrize("numel", [0, 1, 17, 1000])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_allocations_are_aligned_and_counted_to_the_byte(numel, dtype):
    ledger = Ledger()
    array = ledger.empty("params", numel, np.dtype(dtype))
    assert array.shape == (numel,) and array.dtype == dtype and array.flags.c_contiguous
    # A cache line, and the widest vector registers.
    assert array.ctypes.data % 64 == 0 or numel == 0
    assert ledger.alive_bytes("params") == ledger.resident_bytes == numel * np.dtype(dtype).itemsize
    del array
    assert ledger.total_bytes == 0


def test_case_hidden_view_keeps_the_whole_unit_alive():
    ledger = Ledger()
    full = ledger.empty("gathered unit", 100, np.dtype(np.float32))
    shard = full[10:20]
    del full
    assert shard.nbytes == 40
    assert ledger.alive_bytes("gathered unit") == 400
    del shard
    assert ledger.alive_bytes("gathered unit") == 0


def test_tracking_a_view_counts_its_owner_once():
    ledger, base = Ledger(), np.zeros((10, 10), np.float32)
    ledger.track("activations", base[2:4])
    ledger.track("activations", base.T)
    ledger.track("activations", base)
    assert ledger.alive_bytes("activations") == 400


def test_peaks_are_by_kind_and_for_all_transients_together():
    ledger = Ledger()
    kept = ledger.empty("params", 10, np.dtype(np.float32))
    a = ledger.empty("a", 10, np.dtype(np.float32))
    del a
    b = ledger.empty("b", 5, np.dtype(np.float32))
    c = ledger.empty("a", 2, np.dtype(np.float32))
    assert ledger.transient_peaks() == {"a": 40, "b": 20}
    assert ledger.transient_peak_bytes == 40
    assert ledger.transient_bytes == 28
    assert ledger.resident_bytes == 40
    assert ledger.total_bytes == 68 + 3 * ALIGNMENT_BYTES == ledger.total_peak_bytes
    ledger.reset_peaks()
    del b, c
    assert ledger.transient_peak_bytes == 28
    del kept


def test_the_audit_sees_what_the_ledger_does_not():
    ledger, audit = Ledger(), Audit()
    try:
        kept = ledger.empty("params", 50_000, np.dtype(np.float32))
        audit.begin(ledger)
        hidden = np.zeros(10_000, np.float32)
        passing = np.ones(30_000, np.float32)
        del passing
        finding = audit.finding(ledger)
    finally:
        tracemalloc.stop()
    assert finding.resident_outside_bytes == 40_000
    assert 160_000 <= finding.peak_outside_bytes < 170_000
    assert "test_memory.py" in finding.largest
    del kept, hidden


def test_the_audit_finds_nothing_where_all_is_tracked():
    ledger, audit = Ledger(), Audit()
    try:
        kept = ledger.empty("params", 50_000, np.dtype(np.float32))
        audit.begin(ledger)
        passing = ledger.empty("a", 30_000, np.dtype(np.float32))
        del passing
        finding = audit.finding(ledger)
    finally:
        tracemalloc.stop()
    assert finding.resident_outside_bytes == 0
    assert finding.peak_outside_bytes < 8192
    del kept
    gc.collect()


# Two units of 16 MiB, made and freed in turn as in a step; prints the page faults of ten turns.
FREED = """
import resource, sys
import numpy as np
from zero_mpi.memory import Ledger, keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
ledger, dtype = Ledger(), np.dtype(np.float32)
def turn():
    for _ in range(2):
        both = [ledger.empty(kind, 2**22 + 5, dtype) for kind in ("gathered unit", "unit gradient")]
        for array in both:
            array[...] = 1
        del array, both
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    turn()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_ten_turns(what, **environ):
    chosen = ("MALLOC_", "GLIBC_TUNABLES")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    command = [sys.executable, "-c", FREED, what]
    done = subprocess.run(command, env={**clean, **environ}, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it will")
def test_freed_memory_is_kept_where_asked_for_unless_the_environment_chose():
    kept, faults = faults_of_ten_turns("keep")
    assert kept == "True" and faults < 100
    _, faults = faults_of_ten_turns("as it is", MALLOC_TRIM_THRESHOLD_="0")
    assert faults > 100
    for chosen in ({"MALLOC_TRIM_THRESHOLD_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=0"}):
        kept, faults = faults_of_ten_turns("keep", **chosen)
        assert kept == "False" and faults > 100
