"""Traffic: what one rank has sent and received, counted by label.

Not for: counting; that happens where a message is handed over (comm.py).
"""

from collections import Counter
from typing import Any, NamedTuple


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
    """What one rank has sent and received, by label.

    Attributes
    ----------
    calls : how often each of the MPI library's own collectives was called. What a library sends inside one
        is its own affair: no bytes are counted for it, and `total` knows nothing of it.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        # Plain lists in the order of Count's fields: they are added to at every message.
        self._counts: dict[Label, list[int]] = {}

    def count(self, *label: Any) -> list[int]:
        """Return the five numbers under the label with these fields, to be added to in place."""
        count = self._counts.get(label)  # type: ignore[call-overload]
        if count is None:
            count = self._counts[Label(*label)] = [0] * len(Count._fields)
        return count

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
