"""Communicator: ranks and their messages, and the only place where bytes are counted.

Not for: how collectives move model data: by hand, from `sendrecv` alone (ring.py), or as the MPI library
does, whose calls are counted here.
"""

import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from .layout import Blocks
from .traffic import Traffic
from .transport import OUT_OF_STEP, MPITransport, Transport, Warned, is_of_mpi

# Far below 2^31 - 1, the count at which some MPI libraries fail; every message is cut at this length.
MAX_MESSAGE_BYTES = 2**30

# What every MPI library can add up, and the count that all of them take (MPI 3.1: a C int).
LIBRARY_SUMS = ("float32", "float64")
MAX_LIBRARY_NUMEL = 2**31 - 1
# The exit code of a job that an unforeseen error ended.
CRASHED = 3

# Seconds that a rank told to end gives rank 0 to speak for all; and that rank 0 gives a launcher which ends a
# job of its own accord, with SIGTERM first and SIGKILL soon after, since then the reason has been said.
OTHERS_PAUSE_S, TERM_PAUSE_S = 2.5, 1.5

# Every message carries what its sender believes to be doing, so that a rank that hands its units over in
# another order is named instead of summed. Units are told apart modulo 8000: MPI guarantees tags up to 32767.
_COLLECTIVES = ("point-to-point", "reduce-scatter", "all-gather", "control")
_NUMBER_OF = {name: number for number, name in enumerate(_COLLECTIVES)}


def _order_tag(collective: str, unit: int) -> int:
    return _NUMBER_OF[collective] + len(_COLLECTIVES) * (unit % 8000)


def _order_name(tag: int) -> str:
    unit, collective = divmod(tag, len(_COLLECTIVES))
    name = _COLLECTIVES[collective]
    return name if name == "control" else f"{name} of unit {unit}"


class OutOfStep(RuntimeError):
    """Ranks are not at the same collective, or not with the same blocks.

    Raised by a rank that finds it, which warns the others. One that waits inside MPI for a long message of
    its own to be taken hears nothing, until `ending_job_on_error` ends it, unless ranks are `patient`
    (`split`). The communicator is of no use afterwards.
    """


class SharedMistake(ValueError):
    """A mistake that all ranks know of and raise alike; any other error may be one rank's alone."""


class Communicator:
    """Ranks that exchange messages, each of which is counted.

    Parameters
    ----------
    comm : None (the MPI world), an mpi4py communicator (duplicated once, so that no message can meet
        another library's; it must live as long as this one, and freeing it frees the duplicate), or a
        Transport. Collective.
    max_message_bytes : int, at least 1. Longer messages are sent in pieces.

    Attributes
    ----------
    rank, size : this rank, and the number of ranks N.
    phase, unit : what the next messages are counted under; set by the engine and the reducer.
    traffic : the Traffic that counts; replace it to start a new count.
    defers_sends : whether ranks outnumber cores, so that sends are waited for at the end of a collective.
    """

    def __init__(self, comm: Any = None, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        if max_message_bytes < 1:
            raise ValueError(f"max_message_bytes: expected at least 1, got {max_message_bytes}")
        if comm is not None and not hasattr(comm, "exchange") and not hasattr(comm, "Dup"):
            raise TypeError(
                f"comm: expected an mpi4py communicator, a Transport or None, got {type(comm).__name__}"
            )
        self.transport: Transport = comm if hasattr(comm, "exchange") else MPITransport(comm)
        self.rank = self.transport.rank
        self.size = self.transport.size
        self.max_message_bytes = max_message_bytes
        self.phase = "set-up"
        self.unit = 0
        self.traffic = Traffic()
        # A transport may do without it: ranks that each have a core gain nothing.
        self.defers_sends: bool = getattr(self.transport, "defers_sends", False)
        # Of each label met so far, and the one that messages are sent under now.
        self._known: dict[tuple, _Collective] = {}
        self._now = self._outside = _Collective(self, "point-to-point", "model")
        # Ranks whose warning that ranks are out of step has come.
        self._warned_by: set[int] = set()

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
        OutOfStep : what came is not what was expected: ranks are not at the same collective.
        """
        into = receive.flags
        if not (send.flags.c_contiguous and into.c_contiguous and into.writeable):
            self._refuse_buffers(send, receive)
        now = self._now
        out_bytes, in_bytes = send.nbytes, receive.nbytes
        if out_bytes <= self.max_message_bytes and in_bytes <= self.max_message_bytes:
            tag, length = self.transport.exchange(send, dest, now.tag, receive, source)
            if source is not None and (length != in_bytes or tag != now.tag):
                self._refuse_message(source, tag, length, in_bytes)
            out_messages = in_messages = 1
        else:
            out_messages, in_messages = self._exchange_in_pieces(send, dest, receive, source)
        if dest is not None:
            count = now.counts.get(dest) or self._count(dest)
            count[0] += out_bytes
            count[1] += out_messages
            count[2] += send.size
        if source is not None:
            count = now.counts.get(source) or self._count(source)
            count[3] += in_bytes
            count[4] += in_messages

    def _exchange_in_pieces(
        self, send: np.ndarray, dest: int | None, receive: np.ndarray, source: int | None
    ) -> tuple[int, int]:
        """Exchange in messages of at most `max_message_bytes`; return how many were sent and received."""
        limit, tag = self.max_message_bytes, self._now.tag
        outgoing, incoming = (array.reshape(-1).view(np.uint8) for array in (send, receive))
        out_messages = max(1, -(-outgoing.nbytes // limit)) if dest is not None else 0
        in_messages = max(1, -(-incoming.nbytes // limit)) if source is not None else 0
        for i in range(max(out_messages, in_messages)):
            piece = slice(i * limit, (i + 1) * limit)
            dest_now = dest if i < out_messages else None
            source_now = source if i < in_messages else None
            came = self.transport.exchange(outgoing[piece], dest_now, tag, incoming[piece], source_now)
            if source_now is not None and came != (tag, incoming[piece].nbytes):
                self._refuse_message(source_now, *came, incoming[piece].nbytes)
        return out_messages, in_messages

    def collective(self, name: str, kind: str = "model", *, sent_stays: bool = False) -> "_Collective":
        """Count the messages inside the ``with`` under the collective `name`, as traffic of this kind.

        Phase, unit and traffic must not change inside. May stand inside another.

        Parameters
        ----------
        name : one of "point-to-point", "reduce-scatter", "all-gather" and "control".
        kind : "model" or "control".
        sent_stays : the caller's promise that no array sent inside is changed before the end. Sends then need
            not be waited for one by one, which saves ranks that outnumber cores half of their turns.
        """
        # The same few collectives come again in every step; a short message takes hardly longer than a label.
        label = name, kind, self.phase, self.unit, sent_stays
        known = self._known.get(label)
        if known is None or known.entered:
            if name not in _NUMBER_OF:
                raise ValueError(f"name: expected one of {', '.join(_COLLECTIVES)}, got {name}")
            known = self._known[label] = _Collective(self, name, kind, sent_stays)
        elif known.traffic is not self.traffic:
            known.traffic, known.counts = self.traffic, {}
        return known

    def _count(self, peer: int) -> list[int]:
        """Return the numbers that messages with `peer` are counted in; looked up once for a label."""
        now = self._now
        count = self.traffic.count(now.kind, self.phase, now.name, self.unit, peer)
        if now is not self._outside:
            now.counts[peer] = count
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
        mine, theirs = _order_name(self._now.tag), _order_name(came_tag)
        # The others would wait for this rank for ever.
        self.transport.warn(OUT_OF_STEP)
        if came_tag == OUT_OF_STEP:
            self._warned_by.add(source)
            raise OutOfStep(f"rank {self.rank} stopped in {mine}: rank {source} found ranks out of step")
        if mine != theirs:
            raise OutOfStep(
                f"ranks hand units over in different orders: rank {self.rank} is at {mine}, "
                f"rank {source} at {theirs}"
            )
        length = "more" if came > expected else f"{came} B"
        raise OutOfStep(
            f"blocks differ between ranks in {mine}: rank {self.rank} expected {expected} B "
            f"from rank {source}, got {length}"
        )

    # The MPI library's own collectives: another order of summation, and bytes that nobody can count.

    def library_reduce_scatter(self, x: np.ndarray, own: np.ndarray) -> None:
        """Write this rank's block of the sum of `x` over the ranks to `own`, with the library's collective.

        Parameters
        ----------
        x : array, shape (n,), contiguous, float32 or float64. Same n and dtype on every rank. Only read.
        own : array, shape (Blocks(n, N).size(rank),), contiguous, dtype of `x`; overwritten.

        Raises
        ------
        ValueError : other arrays; more than 2^31 - 1 elements; a transport without MPI below it.

        Notes
        -----
        Collective; blocks and spins in the library even where ranks outnumber cores. Counted as one of
        ``traffic.calls["reduce-scatter"]``, and nowhere else. The order of summation is the library's choice.
        """
        call = self.library_call("reduce-scatter", x, own)
        self.traffic.calls["reduce-scatter"] += 1
        call()

    def library_all_gather(self, x: np.ndarray) -> None:
        """Fill `x` with the blocks that the ranks own, with the library's own collective.

        As `library_reduce_scatter`, but `x` may have any dtype of 1, 2, 4 or 8 bytes. Block `rank` is read,
        all others are overwritten.
        """
        call = self.library_call("all-gather", x)
        self.traffic.calls["all-gather"] += 1
        call()

    def library_all_reduce(self, x: np.ndarray) -> None:
        """Replace `x` by its sum over the ranks, with the library's own collective.

        As `library_reduce_scatter`. MPI does not promise that all ranks get the same bits.
        """
        call = self.library_call("all-reduce", x)
        self.traffic.calls["all-reduce"] += 1
        call()

    def library_call(self, name: str, x: np.ndarray, own: np.ndarray | None = None) -> Callable[[], None]:
        """Return the library's collective on these arrays, ready to be called again and again, not counted.

        Parameters
        ----------
        name : "reduce-scatter" (from `x` to `own`), "all-gather" or "all-reduce" (both in place). Arrays and
            errors as in the three methods above. Local; the returned call is collective.
        """
        prepare = getattr(self.transport, "library_call", None)
        if prepare is None:
            raise ValueError(f"library {name}: expected MPI, got {self.transport.describe()} below it")
        if x.ndim != 1 or not x.flags.c_contiguous:
            raise ValueError(
                f"x: expected a contiguous array of shape (n,), got shape {x.shape} (rank {self.rank})"
            )
        blocks = Blocks(x.size, self.size)
        if own is None:
            own = x[blocks.of(self.rank)]
        if not own.flags.c_contiguous or own.shape != (blocks.size(self.rank),) or own.dtype != x.dtype:
            raise ValueError(
                f"own: expected a contiguous array of shape ({blocks.size(self.rank)},) and {x.dtype}, "
                f"got {own.shape} and {own.dtype} (rank {self.rank})"
            )
        if name != "all-gather" and x.dtype.name not in LIBRARY_SUMS:
            raise ValueError(f"x: the MPI library sums {' and '.join(LIBRARY_SUMS)}, got {x.dtype.name}")
        if x.itemsize not in (1, 2, 4, 8):
            raise ValueError(f"x: expected elements of 1, 2, 4 or 8 bytes, got {x.itemsize} ({x.dtype.name})")
        if x.size > MAX_LIBRARY_NUMEL:
            raise ValueError(
                f"x: the MPI library's collectives take at most {MAX_LIBRARY_NUMEL} elements, got {x.size}"
            )
        return prepare(name, x, own, [blocks.size(i) for i in range(self.size)])

    # Control traffic: a few bytes that ranks agree on, counted apart from the model's.

    def allgather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's `payload`, in rank order. Collective; 2(N - 1) messages of control traffic."""
        lengths = self.allgather_scalar(len(payload), np.int64)
        boxes = [np.empty(int(n), np.uint8) for n in lengths]
        boxes[self.rank][:] = np.frombuffer(payload, np.uint8)
        self._pass_around(boxes)
        return [box.tobytes() for box in boxes]

    def allgather_scalar(self, value: Any, dtype: Any = np.float64) -> np.ndarray:
        """Return every rank's `value`, shape (N,), in rank order. Collective; control traffic."""
        return self.allgather_array(np.array([value], dtype))[:, 0]

    def allgather_array(self, values: np.ndarray) -> np.ndarray:
        """Return every rank's `values`, shape (n,) on all, as (N, n) in rank order. Collective; control."""
        rows = np.zeros((self.size, values.size), values.dtype)
        rows[self.rank] = values
        self._pass_around(list(rows))
        return rows

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
        except (ValueError, TypeError, OSError, MemoryError) as error:
            mistake = str(error) or type(error).__name__
        # The name of a file may hold bytes that are no text.
        each = self.allgather_bytes(mistake.encode(errors="surrogateescape"))
        for rank, other in enumerate(each):
            if other:
                words = other.decode(errors="surrogateescape")
                # Where rank 0 has not made it, its host may have what another has not.
                whose = f" (rank {rank})" if rank > 0 and f"rank {rank}" not in words else ""
                raise SharedMistake(words + whose)

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

        The exit code is then 3. An exit with a code other than 0 ends it too; and so do Ctrl-C (130) and
        SIGTERM (143), with one line, even while this rank waits for a message, unless the caller handles
        or ignores them.
        """
        try:
            with self._ending_job_on_signals():
                yield
        except SystemExit as error:
            if error.code not in (None, 0):
                if not isinstance(error.code, int):
                    print(f"zero_mpi: rank {self.rank}: {error.code}", file=sys.stderr, flush=True)
                self.abort(error.code if isinstance(error.code, int) else 1)
            raise
        except BaseException as error:
            if is_of_mpi(error):
                # The rank that is gone has said why, and the launcher ends this one, too.
                time.sleep(TERM_PAUSE_S)
            interrupted = isinstance(error, KeyboardInterrupt)
            what = "was ended by SIGINT" if interrupted else f"failed:\n{traceback.format_exc()}"
            print(f"zero_mpi: rank {self.rank} {what}", file=sys.stderr, flush=True)
            self.abort(128 + signal.SIGINT if interrupted else CRASHED)
            raise

    @contextmanager
    def _ending_job_on_signals(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the job, with one line from one rank.

        Not outside the main thread, nor while somebody else handles or ignores them.

        Python runs a handler only between two of its own instructions, and a rank that waits inside MPI
        executes none. So the handler does nothing, and a thread is woken by the byte that Python writes
        from inside the signal, as it does for each signal that anybody handles.
        """
        plain = (signal.SIG_DFL, signal.default_int_handler)
        caught = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) in plain]
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wakes, woken = os.pipe()
        os.set_blocking(woken, False)

        def ours(number: int, frame: object) -> None:
            """Leave it to the thread."""

        def wait() -> None:
            while came := os.read(wakes, 1):
                if signal.getsignal(came[0]) is ours:
                    self._end_by_signal(came[0])
                elif former_fd >= 0:
                    # Whoever was woken before still waits for it.
                    with suppress(OSError):
                        os.write(former_fd, came)

        former_fd = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        former = {n: signal.signal(n, ours) for n in caught}
        watcher = threading.Thread(target=wait, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            for n, handler in former.items():
                # Unless the body has put its own there.
                if signal.getsignal(n) is ours:
                    signal.signal(n, handler)
            signal.set_wakeup_fd(former_fd)
            os.close(woken)
            watcher.join()
            os.close(wakes)

    def _end_by_signal(self, number: int) -> None:
        if self.rank > 0:
            time.sleep(OTHERS_PAUSE_S)
        elif number == signal.SIGTERM and self.size > 1:
            time.sleep(TERM_PAUSE_S)
        name = signal.Signals(number).name
        print(f"zero_mpi: rank {self.rank} was ended by {name}", file=sys.stderr, flush=True)
        self.abort(128 + number)

    def hosts(self) -> list[str]:
        """Return the host name of every rank, in rank order. Collective; control traffic."""
        return self.allgather_object(platform.node())

    # Other groups of ranks, and other counts for the same ranks.

    def counted_apart(self) -> "Communicator":
        """Return the same ranks and messages with labels and counts of their own. Local."""
        apart = Communicator(self.transport, max_message_bytes=self.max_message_bytes)
        apart._warned_by = self._warned_by
        return apart

    def split(self, color: int | None, key: int = 0, *, patient: bool = False) -> "Communicator | None":
        """Return a communicator of the ranks with the same `color`, ordered by `key`; None for no colour.

        Collective. It counts for itself.

        Parameters
        ----------
        patient : let ranks never block inside MPI, even where each has a core, so that one whose message
            nobody takes hears that ranks are out of step, and raises OutOfStep, too.
        """
        transport = self.transport.split(color, key)
        if transport is None:
            return None
        if patient and hasattr(transport, "defers_sends"):
            transport.defers_sends = True
        return Communicator(transport, max_message_bytes=self.max_message_bytes)

    def free(self) -> None:
        """Give back what `split` made. Collective."""
        self.transport.free()

    def give_up(self) -> None:
        """Leave ranks that are out of step, once each has raised OutOfStep. Collective.

        Receives what came for nobody, up to each rank's warning, its last message: some MPI libraries
        complain of such messages when they end, and the next communicator with this one's number would meet
        them. Then frees.
        """
        unheard = set(range(self.size)) - {self.rank} - self._warned_by
        self.transport.drop(OUT_OF_STEP, unheard)
        self.free()

    def abort(self, code: int = 1) -> None:
        """End the whole job in seconds, whatever the other ranks wait for."""
        self.transport.abort(code)


class _Collective:
    """What `Communicator.collective` returns: under what messages inside are sent and counted."""

    __slots__ = ("_before", "_comm", "_defers_sends", "counts", "entered", "kind", "name", "tag", "traffic")

    def __init__(self, comm: Communicator, name: str, kind: str, sent_stays: bool = False) -> None:
        self._comm, self.name, self.kind = comm, name, kind
        self.tag = _order_tag(name, 0 if kind == "control" else comm.unit)
        self.traffic = comm.traffic
        # The numbers that messages with each peer are counted in.
        self.counts: dict[int, list[int]] = {}
        self._defers_sends = sent_stays and comm.defers_sends
        self.entered = False

    def __enter__(self) -> None:
        self._before, self._comm._now, self.entered = self._comm._now, self, True
        if self._defers_sends:
            self._comm.transport.defer_sends()

    def __exit__(self, kind: object, error: object, _: object) -> None:
        comm = self._comm
        try:
            if self._defers_sends:
                # After an error nobody may be there to receive.
                comm.transport.complete_sends(wait=error is None)
            if isinstance(error, Warned):
                raise error
        except Warned as warned:
            comm._refuse_message(warned.source, OUT_OF_STEP, 0, 0)
        finally:
            comm._now, self.entered = self._before, False
