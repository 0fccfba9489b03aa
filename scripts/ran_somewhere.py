"""Check that each test ran in at least one of several launches: a suite that skips is no suite.

Usage: ran_somewhere.py FILE ... (files that pytest's --outcomes wrote, one a launch)
"""

import sys
from pathlib import Path


def main(paths: list[str]) -> int:
    """Print what ran nowhere; return 1 if anything did, or if a launch left no file."""
    seen: dict[str, set[str]] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            outcome, nodeid = line.split(" ", 1)
            seen.setdefault(nodeid, set()).add(outcome)
    nowhere = [nodeid for nodeid, outcomes in seen.items() if outcomes <= {"skipped"}]
    for nodeid in nowhere:
        print(f"ran at no size: {nodeid}")
    print(f"{len(seen)} tests in {len(paths)} launches, {len(nowhere)} ran at no size")
    return 1 if nowhere or not seen or len(paths) < 6 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
