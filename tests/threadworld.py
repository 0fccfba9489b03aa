"""Ranks as threads: a transport made of queues, so rings and schemes run without mpiexec.

Not for: what MPI itself does; that is tested under mpiexec.
"""

import queue
import threading
import time

import numpy as np

from zero_mpi.comm import Communicator


class ThreadTransport:
    def __init__(self, rank, size, boxes, broken):
        self.rank, self.size, self._boxes, self._broken = rank, size, boxes, broken

    def exchange(self, send, dest, tag, receive, source):
        if dest is not None:
            self._boxes[self.rank, dest].put((tag, send.tobytes()))
        if source is None:
            return -1, 0
        came_tag, came = self._take(self._boxes[source, self.rank])
        fits = min(len(came), receive.nbytes)
        receive.reshape(-1).view(np.uint8)[:fits] = np.frombuffer(came, np.uint8)[:fits]
        return came_tag, len(came)

    def _take(self, box):
        deadline = time.monotonic() + 30
        while not self._broken.is_set() and time.monotonic() < deadline:
            try:
                return box.get(timeout=0.05)
            except queue.Empty:
                pass
        raise ConnectionError("another rank failed, or nothing came for 30 s")

    def wait_for(self, source):
        pass

    def warn(self, tag):
        for rank in range(self.size):
            if rank != self.rank:
                self._boxes[self.rank, rank].put((tag, b""))

    def split(self, color, key):
        # Everyone sends everyone the queue of its messages in the new world.
        out = [queue.Queue() for _ in range(self.size)]
        for dest in range(self.size):
            self._boxes[self.rank, dest].put((color, key, out[dest]))
        came = [self._take(self._boxes[source, self.rank]) for source in range(self.size)]
        if color is None:
            return None
        members = sorted((r for r in range(self.size) if came[r][0] == color), key=lambda r: (came[r][1], r))
        mine = members.index(self.rank)
        boxes = {(mine, i): out[r] for i, r in enumerate(members)}
        boxes.update({(i, mine): came[r][2] for i, r in enumerate(members)})
        return ThreadTransport(mine, len(members), boxes, self._broken)

    def drop(self, last, sources):
        for source in sources:
            while self._take(self._boxes[source, self.rank])[0] != last:
                pass

    def free(self):
        pass

    def abort(self, code):
        self._broken.set()

    def describe(self):
        return "threads"


def run_ranks(size, function, **options):
    """Run `function(comm)` on `size` threads; return the results in rank order, or raise the first error."""
    boxes = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    broken = threading.Event()
    results, errors = [None] * size, []

    def work(rank):
        try:
            results[rank] = function(Communicator(ThreadTransport(rank, size, boxes, broken), **options))
        except BaseException as error:
            errors.append(error)
            broken.set()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [e for e in errors if not isinstance(e, ConnectionError)] or errors
    if first:
        raise first[0]
    return results
