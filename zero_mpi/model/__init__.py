"""Models: what a scheme trains. `MLP` is the one that ships; `Model` is what another must offer.

Not for: parameters; a model owns none, it is handed a unit at a time.
"""

from .mlp import MLP
from .protocol import Model

__all__ = ["MLP", "Model"]
