"""What all tests share: one voice under mpiexec, an end for a rank that fails alone, launched jobs."""

import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

# Before numpy: ranks outnumber cores, and the bits of a product must not depend on a choice of threads.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from _pytest.config import create_terminal_writer  # noqa: E402

from zero_mpi.comm import Communicator  # noqa: E402
from zero_mpi.transport import launched_rank  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parents[1]

# A rank that has failed, or skips, waits so long for the others to end the phase, then ends the job.
PATIENCE_S = 3.0

OUTCOMES = ("passed", "failed", "skipped")


class Ranks:
    """Meets the other ranks after each phase of each test, so that none is ever a phase ahead."""

    def __init__(self):
        from mpi4py import MPI

        self.world = MPI.COMM_WORLD.Dup()

    def meet(self, place, outcome, patient):
        """Return every rank's outcome of `place`; end the job if the others do not come to it.

        place : what was done, such as a test's name and phase. patient : wait as long as it takes; who knows
        of something wrong must not, since the others may be waiting for it elsewhere.
        """
        mine = np.array([zlib.crc32(place.encode()), OUTCOMES.index(outcome)], np.int64)
        all_ranks = np.empty((self.world.size, 2), np.int64)
        request = self.world.Iallgather(mine, all_ranks)
        deadline = time.monotonic() + PATIENCE_S
        while not request.Test():
            if not patient and time.monotonic() > deadline:
                self.end_job(f"{place}: {outcome} here, and the others did not come")
            time.sleep(1e-3)
        if (all_ranks[:, 0] != mine[0]).any():
            self.end_job(f"{place}: other ranks are at another test")
        return [OUTCOMES[row[1]] for row in all_ranks]

    def end_job(self, why):
        self.say(f"{why}: ending the job")
        self.world.Abort(1)

    def say(self, words):
        sys.__stderr__.write(f"\nrank {self.world.rank}: {words}\n")
        sys.__stderr__.flush()


def pytest_addoption(parser):
    parser.addoption("--outcomes", metavar="FILE", help="rank 0 writes each test's outcome to FILE")
    parser.addoption("--needing", metavar="N", type=int, help="run only MPI tests that need N ranks or more")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    ranks = Ranks() if config.getoption("--with-mpi") else None
    config.ranks = ranks if ranks and ranks.world.size > 1 else None
    config.outcomes = {}
    if launched_rank() > 0:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw = create_terminal_writer(config, open(os.devnull, "w"))  # noqa: SIM115 - until the end


def pytest_collection_modifyitems(config, items):
    least = config.getoption("--needing")
    if least is None:
        return
    few = [
        item
        for item in items
        if max((mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi")), default=0) < least
    ]
    config.hook.pytest_deselected(items=few)
    items[:] = [item for item in items if item not in few]


def pytest_runtest_setup(item):
    if item.get_closest_marker("launches") and item.config.ranks:
        pytest.skip("starts jobs of its own: runs in plain pytest")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if item.config.ranks:
        _meet_after(item, report, item.config.ranks)
    if call.when == "call" or report.outcome != "passed":
        item.config.outcomes[item.nodeid] = report.outcome


def _meet_after(item, report, ranks):
    """Give all ranks one outcome of a phase: what some rank failed, or only some skipped, has failed."""
    if report.failed:
        ranks.say(f"{item.nodeid} failed in {report.when}:\n{report.longreprtext}")
    item.untroubled = getattr(item, "untroubled", True) and report.passed
    outcomes = ranks.meet(f"{item.nodeid} ({report.when})", report.outcome, patient=item.untroubled)
    if len(set(outcomes)) > 1 and not report.failed:
        others = [f"{other} on rank {rank}" for rank, other in enumerate(outcomes) if other != report.outcome]
        report.longrepr = f"{report.outcome} here, {', '.join(others)}"
        report.outcome = "failed"


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--outcomes")
    if path and launched_rank() == 0:
        lines = [f"{outcome} {nodeid}\n" for nodeid, outcome in session.config.outcomes.items()]
        Path(path).write_text("".join(lines))
    ranks = session.config.ranks
    if ranks:
        # A rank that could not collect, or was interrupted, is here while the others run tests.
        well = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        outcomes = ranks.meet("end of the session", "passed" if well else "failed", patient=well)
        if "failed" in outcomes and well:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def comm():
    """Return a communicator over all ranks of the job, with messages of its own."""
    communicator = Communicator()
    yield communicator
    communicator.free()


@pytest.fixture
def ranks_of(comm):
    """Return a function: n -> a communicator of the first n ranks, None on the others."""
    made = []

    def first(n):
        part = comm.split(0 if comm.rank < n else None)
        if part is not None:
            made.append(part)
        return part

    yield first
    for part in made:
        part.free()


class Job:
    """What a launched job printed and how it ended."""

    def __init__(self, code, out, err, elapsed_s):
        # Open MPI's launcher ends its own words with a NUL, which then begins the next line.
        self.code, self.out, self.err, self.elapsed_s = code, out, err.replace("\0", ""), elapsed_s

    @property
    def complaints(self):
        """The lines in which zero_mpi says what is wrong."""
        return [line for line in self.err.splitlines() if line.startswith("zero_mpi: error:")]


def job_environment(**extra):
    """Return an environment for mpiexec, free of what a surrounding job has set."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "PMIX", "HYDI"))}
    env.update(
        # Harmless elsewhere: Open MPI refuses root, and more ranks than cores, without them.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe",
        OMPI_MCA_rmaps_base_oversubscribe="1",
    )
    env.update(extra)
    return env


def mpiexec():
    """Return the mpiexec that belongs to this environment: beside its Python, or on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def start(command, cwd=ROOT, **env):
    """Start `command` in a process group of its own."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env=job_environment(**env),
        start_new_session=True,
    )


def finish(process, timeout_s=240):
    """Wait for `process`; on a timeout end its group, by id, and fail."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"hung for {timeout_s} s: {process.args}\n{out}\n{err}")
    return Job(process.returncode, out, err, time.monotonic() - began)


@pytest.fixture
def launch():
    """Return a function that runs `mpiexec -n N python ARGS` and returns the Job."""

    def run(n, *args, timeout_s=240, **env):
        command = [mpiexec(), "-n", str(n), sys.executable, *map(str, args)]
        return finish(start(command, **env), timeout_s)

    return run
