"""The suite's own machinery: a rank that fails, skips or dies alone, in any phase, ends the job in red."""

import sys
import time

import pytest
from conftest import ROOT, finish, mpiexec, start

pytestmark = pytest.mark.launches

SMALL = """
import os, signal, time
import pytest
from mpi4py import MPI

world = MPI.COMM_WORLD
HOW, PHASE = {how!r}, {phase!r}

def here(phase):
    if phase != PHASE:
        return
    if world.rank == 1:
        with open(os.path.join(os.path.dirname(__file__), "began"), "w") as file:
            file.write(str(time.time()))
        if HOW == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if HOW == "interrupted":
            raise KeyboardInterrupt
        if HOW == "skips":
            pytest.skip("only here")
        raise ValueError("only here")
    if HOW == "leaves others waiting":
        world.Barrier()

@pytest.fixture
def thing():
    here("setup")
    yield
    here("teardown")

here("collection")

@pytest.mark.mpi
def test_small(thing):
    here("call")

@pytest.mark.mpi
def test_after(thing):
    pass
"""


def small_job(tmp_path, how, phase):
    """Run a small suite at N = 3; return the job, and the seconds from what rank 1 did to its end."""
    (tmp_path / "test_small.py").write_text(SMALL.format(how=how, phase=phase))
    command = [mpiexec(), "-n", "3", sys.executable, "-m", "pytest", "-p", "conftest", "-c"]
    command += [ROOT / "setup.cfg", "--rootdir", tmp_path, "-p", "no:cacheprovider", "--with-mpi", tmp_path]
    job = finish(start(command, PYTHONPATH=str(ROOT / "tests"), PY_COLORS="0"), timeout_s=20)
    ended = time.time()
    began = tmp_path / "began"
    return job, ended - float(began.read_text()) if began.exists() else None


def test_a_small_suite_that_holds_is_green(tmp_path):
    job, _ = small_job(tmp_path, "raises", "never")
    assert job.code == 0, job.out + job.err
    assert job.out.count("2 passed") == 1


PHASES = ["setup", "call", "teardown"]
ALONE = [(how, phase) for how in ("raises", "skips", "killed", "leaves others waiting") for phase in PHASES]
ALONE += [("raises", "collection"), ("leaves others waiting", "collection"), ("interrupted", "call")]


@pytest.mark.parametrize("how, phase", ALONE)
def test_a_rank_that_fails_alone_ends_the_suite_within_5_s(tmp_path, how, phase):
    job, elapsed_s = small_job(tmp_path, how, phase)
    assert job.code != 0 and elapsed_s < 5
    assert "2 passed in" not in job.out, job.out
    if how == "raises" and phase != "collection":
        assert f"rank 1: test_small.py::test_small failed in {phase}" in job.err
        assert "passed here, failed on rank 1" in job.out


def test_a_skip_on_one_rank_only_is_a_failure(tmp_path):
    job, _ = small_job(tmp_path, "skips", "call")
    assert job.code != 0
    assert "passed here, skipped on rank 1" in job.out and "1 failed, 1 passed" in job.out
