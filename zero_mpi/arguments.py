"""Arguments: the kinds of values that commands take, and a parser that raises instead of ending the process.

Not for: any command's own options.
"""

import argparse
from typing import Any, NoReturn

from .precision import LEAST, MOST
from .training import SMALLEST_SCALE, LossScale


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ValueErrors: one rank speaks for all, and in one line.

    Parameters
    ----------
    text : the whole help, where options are too many for one a line.
    """

    def __init__(self, text: str = "", **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._text = text

    def format_help(self) -> str:
        return self._text or super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("ignored explicit argument", "expected no value, got"))


def positive_int(text: str) -> int:
    """Return a whole number of at least 1."""
    return whole(text, least=1)


def whole_from_0(text: str) -> int:
    """Return a whole number of at least 0."""
    return whole(text, least=0)


def whole(text: str, least: int, most: int = 2**31 - 1) -> int:
    """Return a whole number from `least` to `most`."""
    # Plain digits: Python's int also takes 1_0, and digits of other scripts. Its length is limited, too.
    plain = text.isascii() and text.isdigit() and len(text) <= 10
    if not plain or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {least} to {most}, got {_shown(text)}"
        )
    return int(text)


def byte_size(text: str) -> int:
    """Return a number of bytes from a text such as 4096, 64K, 64M or 1G, as nccl-tests takes them."""
    factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 15) or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"expected bytes such as 4096, 64K or 64M, got {_shown(text)}")
    return int(digits) * factor


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def positive_float(text: str) -> float:
    """Return a finite number above 0, which it still is in float32."""
    value = _number(text)
    if value is None or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {_shown(text)}")
    if not LEAST <= value <= MOST:
        raise argparse.ArgumentTypeError(f"expected a number from {LEAST} to {MOST}, got {_shown(text)}")
    return value


def float_from_0(text: str) -> float:
    """Return a finite number of at least 0, which float32 holds."""
    value = _number(text)
    if value is None or not 0 <= value <= MOST:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to {MOST}, got {_shown(text)}")
    return value


def fraction(text: str) -> float:
    """Return a number of at least 0 and below 1."""
    value = _number(text)
    if value is None or not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to below 1, got {_shown(text)}")
    return value


def _number(text: str) -> float | None:
    """Return the number that `text` is; Python's float also takes 1_0, and digits of other scripts."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def loss_scale(text: str) -> LossScale | None:
    """Return what --loss-scale asks for."""
    if text == "none":
        return None
    if text == "dynamic":
        return LossScale()
    try:
        return LossScale(initial=positive_float(text), dynamic=False)
    except (argparse.ArgumentTypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"expected dynamic, none or a number from {SMALLEST_SCALE} to {MOST}, got {_shown(text)}"
        ) from None


def limit(text: str) -> float | None:
    """Return a finite number above 0, or None for the text none."""
    return None if text == "none" else positive_float(text)


def units(text: str) -> tuple[int, ...]:
    """Return numbers of units, in rising order, each once, from a list such as 0,2, or none."""
    if text == "none":
        return ()
    return tuple(sorted({whole_from_0(part.strip()) for part in text.split(",")}))


def widths(text: str) -> tuple[int, ...]:
    """Return the widths of an MLP, from a list such as 64,128,10."""
    dims = tuple(positive_int(part.strip()) for part in text.split(","))
    if len(dims) < 2:
        raise argparse.ArgumentTypeError(
            f"expected at least two widths, such as 64,128,10, got {_shown(text)}"
        )
    return dims


def sizes(text: str) -> tuple[int, ...]:
    """Return numbers of ranks, in rising order, each once, from a list such as 1,2,4."""
    return tuple(sorted({positive_int(part.strip()) for part in text.split(",")}))
