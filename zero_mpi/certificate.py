"""Certificate: a chain of digests of a run, step by step and unit by unit; two of them can be compared.

Not for: causes; digests say where two runs part first, and with what settings. `--scheme all` finds the
element and the cause (parting.py).

For any training loop, on numpy arrays or on numpy views of CPU tensors:

    chain = Chain(units=[p.numel() for p in model.parameters()])
    chain.append(0, params=[p.detach().numpy() for p in model.parameters()])
    ...                                     # after each step
    chain.append(step, grads=[...], params=[...], loss=loss, data=rows_digest(x, y))
    write("mine.json", {"mine": chain}, settings={"model": "my MLP", "ranks": 1})

Rank by rank, without a gather: each rank takes `digest(block, start, unit)` of what it owns, and the digests
of a unit are added modulo 2^64 (`add`).
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .digest import digest, rows_digest

__all__ = [
    "Chain",
    "Comparison",
    "Link",
    "add",
    "compare",
    "digest",
    "document",
    "read",
    "rows_digest",
    "write",
]

SCHEMA = "zero_mpi.certificate/2"

# Settings that two runs have to share, or there is nothing to compare.
SHARED = ("model", "unit_numels")


class Link(NamedTuple):
    """One step of a chain: digests as 16 hexadecimal digits, one a unit; None where nothing was taken.

    Fields
    ------
    grads : of the mean gradient after reduction. params : of the float32 weights after the update.
    data : of all rows of the step.
    """

    step: int
    loss: float | None
    data: str | None
    grads: list[str] | None
    params: list[str]


@dataclass
class Chain:
    """The links of one run, in the order of steps; step 0 has the initial weights.

    Parameters
    ----------
    units : number of elements of each unit.
    """

    units: Sequence[int]
    links: list[Link] = field(default_factory=list)

    def append(
        self,
        step: int,
        *,
        params: Sequence[np.ndarray | int],
        grads: Sequence[np.ndarray | int] | None = None,
        loss: float | None = None,
        data: int | None = None,
    ) -> None:
        """Append the link of `step`.

        Parameters
        ----------
        loss : left out where it is not finite: JSON has no number for it.
        params, grads : for each unit its whole array, any shape, of 1, 2, 4 or 8 bytes an element; or the
            sum of its blocks' digests.

        Raises
        ------
        ValueError, TypeError : steps that do not rise, another number of units or of elements, or no array.
        """
        if step != int(step):
            raise ValueError(f"step: expected a whole number, got {step}")
        if self.links and step <= self.links[-1].step:
            raise ValueError(f"step: expected more than {self.links[-1].step}, got {step}")
        self.links.append(
            Link(
                int(step),
                float(loss) if loss is not None and math.isfinite(loss) else None,
                None if data is None else _hex(data),
                None if grads is None else self._digests("grads", grads),
                self._digests("params", params),
            )
        )

    def _digests(self, name: str, units: Sequence[np.ndarray | int]) -> list[str]:
        if len(units) != len(self.units):
            raise ValueError(f"{name}: expected {len(self.units)} units, got {len(units)}")
        texts = []
        for u, (unit, numel) in enumerate(zip(units, self.units, strict=True)):
            if isinstance(unit, np.ndarray):
                if unit.size != numel:
                    raise ValueError(f"{name} of unit {u}: expected {numel} elements, got {unit.size}")
                unit = digest(np.ascontiguousarray(unit).reshape(-1), 0, u)
            elif not isinstance(unit, (int, np.integer)):
                kind = type(unit).__name__
                raise TypeError(f"{name} of unit {u}: expected a numpy array or a digest, got {kind}")
            texts.append(_hex(int(unit)))
        return texts


def write(path: str | os.PathLike, chains: Mapping[str, Chain], settings: Mapping[str, Any]) -> None:
    """Write the chains of one run, by name, with its settings, to a JSON file."""
    # The text first: settings that JSON cannot hold leave no file begun.
    text = json.dumps(document(chains, settings), indent=1)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")


def document(chains: Mapping[str, Chain], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `write` writes."""
    if not chains:
        raise ValueError("chains: expected at least one, got none")
    return {
        "schema": SCHEMA,
        "settings": {**settings, "unit_numels": [int(n) for n in next(iter(chains.values())).units]},
        "chains": {name: [link._asdict() for link in chain.links] for name, chain in chains.items()},
    }


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Return the certificate in a file.

    Raises
    ------
    ValueError : the file cannot be read or is no certificate; one line that names it.
    """
    name = os.fspath(path)
    if not name:
        raise ValueError("expected a certificate, got an empty name")
    try:
        # What is no file, such as a pipe, may never end.
        if not stat.S_ISREG(os.stat(name).st_mode) and not os.path.isdir(name):
            raise ValueError(f"{name}: expected a certificate, got no regular file")
        with open(name, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: expected a certificate, got a file that is no text") from None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name}: expected a certificate, got a file that is damaged or no JSON") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        got = f"JSON with the schema {schema}" if isinstance(schema, str) else "JSON that is none"
        raise ValueError(f"{name}: expected a certificate, {SCHEMA}, got {got}")
    try:
        units = len(found["settings"]["unit_numels"])
        chains = {key: [Link(**link) for link in links] for key, links in found["chains"].items()}
        wrong = next((key for key, links in chains.items() if not _is_chain(links, units)), None)
    except (KeyError, TypeError, AttributeError):
        chains, wrong = {}, None
    if not chains or wrong is not None:
        which = "" if wrong is None else f", in chain {wrong}"
        raise ValueError(f"{name}: expected a certificate, got one that lacks something{which}")
    return {**found, "chains": chains}


def _is_chain(links: Sequence[Link], units: int) -> bool:
    """Return whether links that were read are such as `Chain` writes: steps that rise, a digest a unit."""
    steps = [link.step for link in links]
    digests = [texts for link in links for texts in (link.grads, link.params) if texts is not None]
    return (
        all(type(step) is int for step in steps)
        and steps == sorted(set(steps))
        and all(type(texts) is list and len(texts) == units for texts in digests)
        and all(link.params is not None for link in links)
        and all(type(text) is str and len(text) == 16 for texts in digests for text in texts)
    )


class Comparison(NamedTuple):
    """What two chains have in common.

    Fields
    ------
    first, second : their names. same_steps, steps : how many links are the same, of how many compared.
    step, phase, unit : where they part first; phase is "initial weights", "data", "gradient" or "parameters".
    cause : "different initial weights", "different data", or "unknown": digests show no element. "" if all is
        the same.
    not_compared : what could not be, in words.
    """

    first: str
    second: str
    same_steps: int
    steps: int
    step: int | None
    phase: str
    unit: int | None
    cause: str
    not_compared: list[str]


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Comparison]:
    """Compare two certificates, as `read` returns them: chains of the same name, then the rest in turn.

    So a run of ZeRO-1 and one of ZeRO-3, each beside data parallel, are compared in both. Losses are not:
    they are for people, and other programs take them over other rows.

    Raises
    ------
    ValueError : they have nothing to compare: another model, or other steps.
    """
    for name in SHARED:
        one, other = a["settings"].get(name), b["settings"].get(name)
        if one != other:
            raise ValueError(f"{name}: expected the same in both certificates, got {one} and {other}")
    common = [name for name in a["chains"] if name in b["chains"]]
    left = [[name for name in certificate["chains"] if name not in common] for certificate in (a, b)]
    pairs = [*((name, name) for name in common), *zip(*left, strict=False)]
    found = [_compared(one, a, other, b) for one, other in pairs]
    alone = [name for names in left for name in names[min(map(len, left)) :]]
    if alone:
        plural = "a chain" if len(alone) == 1 else "chains"
        found[0].not_compared.append(f"{', '.join(alone)}: {plural} that only one of them has")
    return found


def settings_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, one, other) of the settings that two certificates do not share."""
    names = [*a["settings"], *(name for name in b["settings"] if name not in a["settings"])]
    both = [(name, a["settings"].get(name), b["settings"].get(name)) for name in names]
    return [(name, one, other) for name, one, other in both if one != other]


def _compared(one: str, a: Mapping[str, Any], other: str, b: Mapping[str, Any]) -> Comparison:
    first, second = a["chains"][one], b["chains"][other]
    ends = [links[-1].step if links else 0 for links in (first, second)]
    if ends[0] != ends[1]:
        raise ValueError(f"steps: expected the same in both certificates, got {ends[0]} and {ends[1]}")
    theirs = {link.step: link for link in second}
    pairs = [(link, theirs[link.step]) for link in first if link.step in theirs]
    not_compared = []
    alone = len(first) + len(second) - 2 * len(pairs)
    if alone:
        not_compared.append(f"{alone} {'step' if alone == 1 else 'steps'} that only one of them has")
    stored = [certificate["settings"].get("grads_dtype") for certificate in (a, b)]
    if stored[0] != stored[1]:
        not_compared.append(f"gradients, stored as {stored[0]} and {stored[1]}")
    for name, words in (("data", "data"), ("grads", "gradients")):
        without = [x for x, y in pairs if x.step > 0 and None in (getattr(x, name), getattr(y, name))]
        if without:
            not_compared.append(f"{words} of {len(without)} steps, of which one of them has no digest")
    if not pairs:
        raise ValueError("steps: expected some that both certificates have, got none")
    parted = [(x, y, found) for x, y in pairs if (found := _parts(x, y, stored[0] == stored[1]))]
    same = len(pairs) - len(parted)
    if not parted:
        return Comparison(one, other, same, len(pairs), None, "", None, "", not_compared)
    link, _, (phase, unit) = parted[0]
    cause = {"initial weights": "different initial weights", "data": "different data"}.get(phase, "unknown")
    return Comparison(one, other, same, len(pairs), link.step, phase, unit, cause, not_compared)


def _parts(x: Link, y: Link, compare_grads: bool) -> tuple[str, int | None] | None:
    """Return the phase and the unit in which two links of a step part first; None if they do not."""
    if x.data is not None and y.data is not None and x.data != y.data:
        return "data", None
    if compare_grads and x.grads is not None and y.grads is not None:
        for u, (mine, theirs) in enumerate(zip(x.grads, y.grads, strict=True)):
            if mine != theirs:
                return "gradient", u
    for u, (mine, theirs) in enumerate(zip(x.params, y.params, strict=True)):
        if mine != theirs:
            return ("parameters" if x.step else "initial weights"), u
    return None


def add(digests: Iterable[int]) -> int:
    """Return the digest of a whole, from those of its blocks."""
    return sum(digests) % 2**64


def _hex(value: int) -> str:
    return f"{value % 2**64:016x}"
