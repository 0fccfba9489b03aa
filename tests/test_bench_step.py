"""scripts/bench_step.py runs and says what it measured; nothing here looks at a time."""

import json
import sys

import pytest
from conftest import finish, start

pytestmark = pytest.mark.launches

SMALL = ("--models", "5-4-3,7-6", "--ranks", "1,3", "--rounds", "2", "--steps", "2", "--no-torch")
SCHEMES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")


@pytest.fixture
def bench():
    """Return a function that runs the script with arguments, and returns the Job."""
    return lambda *args: finish(start([sys.executable, "scripts/bench_step.py", *map(str, args)]))


def test_the_table_has_a_row_for_each_model_and_scheme(bench, tmp_path):
    job = bench(*SMALL, "--json", tmp_path / "times.json")
    assert job.code == 0, job.err
    lines = job.out.splitlines()
    assert max(map(len, lines)) <= 80 and "left out: our rows alone" in lines[0]
    assert [line[:6] for line in lines if line.startswith("N = ")] == ["N = 1:", "N = 3:"]
    for name in ("numpy, one rank", *SCHEMES):
        assert sum(line[12:].startswith(name) for line in lines) == 4
    assert [line[:10].strip() for line in lines if "numpy" in line] == ["39", "48"] * 2
    result = json.loads((tmp_path / "times.json").read_text())
    assert result["schema"] == "zero_mpi.bench_step/1" and result["rounds"] == 2
    assert [(one["ranks"], one["n_params"]) for one in result["results"]] == [
        (1, 39),
        (1, 48),
        (3, 39),
        (3, 48),
    ]
    for one in result["results"]:
        assert {name: len(ms) for name, ms in one["rounds_ms"].items()} == dict.fromkeys(
            ["numpy", "dp", "zero1", "zero2", "zero3"], 2
        )


def test_the_profile_gives_shares_that_add_up(bench, tmp_path):
    job = bench(*SMALL, "--profile", "--json", tmp_path / "parts.json")
    assert job.code == 0, job.err
    lines = job.out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line[2:].startswith(SCHEMES)]
    assert len(rows) == 16
    for row in rows:
        needed, rest = row[15:].split("|")
        *parts, together = map(int, needed.split()[1:])
        assert abs(sum(parts) - together) <= 2 and abs(together + sum(map(int, rest.split())) - 100) <= 4
    for one in json.loads((tmp_path / "parts.json").read_text())["results"]:
        for ms in one["parts_ms"].values():
            assert [part for part, value in ms.items() if not value] == ["MPI"] * (one["ranks"] == 1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--models", "5"), "argument --models: expected widths such as 64-128-10, at least two, got '5'"),
        (("--ranks", "0"), "argument --ranks: expected a whole number of at least 1, got '0'"),
        (("--json", "/nowhere/times.json"), "No such file or directory: '/nowhere/times.json'"),
        (
            (*SMALL, "--timeout", "1", "--steps", "1000000"),
            "step_ours.py: expected an end in 1 s (--timeout)",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(bench, args, words):
    job = bench(*args)
    assert job.code == 2
    assert job.err.startswith("bench_step: error: ") and job.err.count("\n") == 1 and words in job.err
