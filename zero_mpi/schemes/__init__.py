"""The four schemes, and the register that a new one enters with one line.

Not for: what schemes share (base.py).
"""

from .. import formulas
from .base import Scheme
from .dp import DP
from .zero1 import ZeRO1
from .zero2 import ZeRO2
from .zero3 import ZeRO3

# Each scheme with the formula it is held to. Iterating gives the classes, data parallel first.
SCHEMES: dict[type[Scheme], formulas.Claim] = {
    DP: formulas.DP,
    ZeRO1: formulas.ZERO1,
    ZeRO2: formulas.ZERO2,
    ZeRO3: formulas.ZERO3,
}

__all__ = ["DP", "SCHEMES", "Scheme", "ZeRO1", "ZeRO2", "ZeRO3"]
