"""Data parallel, ZeRO-1, ZeRO-2 and ZeRO-3 on real MPI ranks: the same bits, and every byte counted.

Not for: names. Import `MLP` from `zero_mpi.model`, `SCHEMES` and the four classes from `zero_mpi.schemes`.
"""

__version__ = "0.2.0"
