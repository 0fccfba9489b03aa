"""Entry of `python -m zero_mpi`: settle the BLAS threads, before numpy is loaded, and malloc; then run.

Not for: choosing a command (cli.py).
"""

import os
import signal
import sys

# Ranks outnumber cores soon enough. Who sets any of these has chosen.
BLAS_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def take_one_blas_thread() -> None:
    """Settle on one BLAS thread unless the environment has chosen; before numpy is loaded."""
    if not any(name in os.environ for name in BLAS_THREADS):
        os.environ.update(dict.fromkeys(BLAS_THREADS, "1"))


def main() -> int:
    """Run the command line; return the exit code."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        # Ctrl-C while modules load ends the process without a traceback; later the job, with one line.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    take_one_blas_thread()
    from .cli import main as run
    from .memory import keep_freed_memory

    keep_freed_memory()
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
