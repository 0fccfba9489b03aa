"""The README: every command in it runs, and the numbers it shows are the ones a run prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, finish, mpiexec, start

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
SHELL = [text.splitlines() for kind, text in BLOCKS if kind == "sh"]
COMMANDS = [line for lines in SHELL for line in lines]
# The suite and the continuous integration run these themselves.
SCRIPTS = ["scripts/run.sh", "scripts/test.sh"]
SUITE = "mpiexec -n 4 pytest --with-mpi"


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 6 and set(SCRIPTS) <= set(COMMANDS) and SUITE in COMMANDS


@pytest.mark.launches
@pytest.mark.parametrize("block", SHELL[1:], ids=lambda lines: lines[0])
def test_commands_of_the_readme_run(tmp_path, block):
    # What they write must not be left in the project; what they read is there.
    for name in ("tests", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in block:
        words = command.split()
        if command == SUITE:
            continue
        if words[0] == "mpiexec":
            words[0] = mpiexec()
        words[words.index("python")] = sys.executable
        job = finish(start(words, cwd=tmp_path))
        assert job.code == 0, job.err
        assert "FAILS" not in job.out and "ESCAPED" not in job.out


@pytest.mark.launches
def test_the_cluster_script_runs(tmp_path):
    script = next(text for kind, text in BLOCKS if kind == "bash")
    other = re.search("launcher: (mpiexec .*)", script)[1]
    activate = tmp_path / "zero_mpi-env" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f"PATH={Path(sys.executable).parent}:{Path(mpiexec()).parent}:$PATH\n")
    # What a cluster has and this machine may not: modules and Slurm.
    cluster = tmp_path / "cluster"
    cluster.write_text(
        'module() { [ "$1" = load ]; }\n'
        'srun() { while [[ $1 == --* ]]; do shift; done; mpiexec -n 4 "$@"; }\n'
    )
    words = ["bash", "-ec", f"{script}{other}"]
    job = finish(start(words, cwd=tmp_path, HOME=str(tmp_path), BASH_ENV=str(cluster)))
    assert job.code == 0, job.err
    assert "on 4 ranks" in job.out and "on 16 ranks" in job.out and (tmp_path / "out.json").exists()


@pytest.mark.launches
def test_the_suites_command_runs_tests():
    words = [mpiexec(), "-n", "4", sys.executable, "-m", "pytest", "--with-mpi", "tests/test_spec.py"]
    job = finish(start(words))
    assert job.code == 0, job.out + job.err
    assert job.out.count("passed") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_of_the_readme_parse(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)


@pytest.mark.launches
def test_the_tables_shown_are_the_tables_printed(launch):
    shown = next(text for _, text in BLOCKS if text.startswith("zero_mpi "))
    job = launch(8, "-m", "zero_mpi", "--scheme", "all")
    # All but the machine, and the losses' and the digest's last bits, which are another BLAS's own.
    for title in ("Memory per rank", "Transient peak", "Traffic per rank", "Traffic in units", "Checks"):
        assert section(shown, title) == section(job.out, title)


def section(text, title):
    lines = text[text.index(title) :].splitlines()
    return lines[: lines.index("") if "" in lines else None]


@pytest.mark.launches
def test_the_matrix_of_faults_shown_is_the_one_printed(launch):
    shown = next(text for _, text in BLOCKS if text.startswith("Faults made on purpose"))
    job = launch(4, "-m", "zero_mpi", "faults")
    assert job.code == 0 and job.out.strip() == shown.strip()


@pytest.mark.launches
def test_the_library_example_runs(launch, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(next(text for kind, text in BLOCKS if kind == "python"))
    job = launch(2, script)
    assert job.code == 0, job.err


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.launches
@pytest.mark.parametrize(
    "ranks, options, title",
    [
        (32, ["--sweep", "1,2,4,8,16,32", "--no-reference"], "Traffic per rank and step, in units"),
        (32, ["--sweep", "1,2,4,8,16,32", "--no-reference"], "Memory per rank, bytes per parameter"),
        (8, ["--precision", "fp32"], "Learning\n"),
    ],
)
def test_the_other_tables_shown_are_printed_too(launch, ranks, options, title):
    shown = next(text for _, text in BLOCKS if title in text and not text.startswith("zero_mpi "))
    job = launch(ranks, "-m", "zero_mpi", *options)
    assert job.code == 0, job.err
    # The digest's bits are another BLAS's own; all else, losses included, is the same everywhere.
    without = re.compile(r" [0-9a-f]{16}$")
    rows = [[without.sub("", line) for line in section(text, title)] for text in (shown, job.out)]
    assert rows[0] == rows[1]


@pytest.mark.launches
def test_the_cause_shown_is_the_one_found(launch):
    options = re.search(r"mpiexec -n 3 python -m zero_mpi (--scheme zero1 --inject [^`]*)`", README)[1]
    job = launch(3, "-m", "zero_mpi", *options.split())
    assert job.code == 1
    shown = next(text for _, text in BLOCKS if text.startswith("ZeRO-1 first parts"))
    # Which element, and how far, is another BLAS's own.
    rows = [section(text, "    class")[:4] for text in (shown, job.out)]
    assert rows[0] == rows[1] and "summation order" in rows[0][0]


@pytest.mark.launches
def test_the_orders_shown_send_what_they_send(launch):
    shown = next(text for _, text in BLOCKS if text.startswith("Orders of summation"))
    job = launch(4, "-m", "zero_mpi", "orders")
    assert job.code == 0, job.err
    title = "4 ranks: what a rank sends"
    assert section(shown, title) == section(job.out, title)
    for title in ("Orders of summation", "4 ranks: the gradient", "4 ranks: max"):
        # How far sums are apart is another BLAS's own.
        names = [[line.split("  ")[1:2] for line in section(text, title)] for text in (shown, job.out)]
        assert names[0] == names[1]
