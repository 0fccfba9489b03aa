"""The command line: which command, exit codes, the hook that ends a job whose rank fails.

Exit codes: 0 all checks hold; 1 one fails, or a number stops being finite; 2 a mistake in what was asked;
3 an error that was not foreseen (comm.py); 130 and 143 after Ctrl-C and SIGTERM.

Not for: import; nobody imports it but __main__.py.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from . import __version__, bench, compare, faults, orders, report, train
from .comm import Communicator, SharedMistake
from .engine import NotFinite
from .transport import MPIMissing, launched_rank, launched_size, launcher_mismatch

NOT_FINITE, MISTAKE = 1, 2

ANSWERS = ("-h", "--help", "--version")


class Command(Protocol):
    """A module that is a command."""

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of its arguments."""

    def main(self, comm: Communicator, argv: Sequence[str]) -> int:
        """Run on every rank; return the exit code, the same on all.

        Raises
        ------
        SharedMistake : the user's. NotFinite : a number stopped being finite. OutOfStep : ranks are not at
            the same collective.
        """


COMMANDS: dict[str, Any] = {"bench": bench, "compare": compare, "faults": faults, "orders": orders}


def main(argv: Sequence[str]) -> int:
    """Run the command line on every rank; return the exit code, as above."""
    name = argv[0] if argv and argv[0] in COMMANDS else ""
    command: Command = COMMANDS.get(name, train)
    asked = next((a for a in argv if a in ANSWERS), "")
    if asked and launched_size() == 1:
        return _answer(command, asked)
    try:
        comm = Communicator()
    except MPIMissing as error:
        if asked:
            return _answer(command, asked)
        if launched_rank() == 0:
            report.complain(str(error))
        return MISTAKE
    alone = launcher_mismatch(comm.size)
    if alone is not None and not asked:
        if launched_rank() == 0:
            report.complain(alone)
        return MISTAKE
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without θ gets a question mark.
        sys.stdout.reconfigure(errors="replace")
    with comm.ending_job_on_error():
        try:
            # A rank that was asked for help would leave the others waiting.
            asks = {"command": name or "train", "--help or --version": asked or "neither"}
            comm.agree(zero_mpi=__version__, **asks)
            return _answer(command, asked) if asked else command.main(comm, argv[bool(name) :])
        except (SharedMistake, NotFinite) as error:
            if comm.rank == 0:
                report.complain(str(error))
            return MISTAKE if isinstance(error, SharedMistake) else NOT_FINITE


def _answer(command: Command, asked: str) -> int:
    """Print the help or the version, from one process. Local."""
    if launched_rank() > 0:
        return 0
    text = f"zero_mpi {__version__}" if asked == "--version" else command.parser().format_help().rstrip()
    return MISTAKE if report.complain_of([report.say([text])]) else 0
