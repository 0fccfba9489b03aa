"""The scripts, with a Python that only pretends to install: first runs at once, links, a missing MPI."""

import os
import shutil
import stat
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.launches

PRETENDS = f"""#!/usr/bin/env bash
if [ "$1 $2" = "-m venv" ]; then
  echo made >>"$LOG"
  mkdir -p "$3/bin"
  printf '#!/usr/bin/env bash\\nsleep 1\\n' >"$3/bin/pip"
  printf '#!/usr/bin/env bash\\necho ran "$@"\\n' >"$3/bin/mpiexec"
  chmod +x "$3/bin/pip" "$3/bin/mpiexec"
else
  exec {sys.executable} "$@"
fi
"""
TOOLS = [
    "bash",
    "env",
    "cat",
    "cksum",
    "chmod",
    "dirname",
    "flock",
    "head",
    "id",
    "mkdir",
    "readlink",
    "rm",
    "sleep",
]


@pytest.fixture
def project(tmp_path):
    """Return a copy of the project whose scripts run with the tools above and nothing else on the path."""
    shutil.copytree(ROOT / "scripts", tmp_path / "project" / "scripts")
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / "project")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    (tmp_path / "python").write_text(PRETENDS)
    (tmp_path / "python").chmod(stat.S_IRWXU)
    return tmp_path / "project"


def run(project, *args, script=None):
    """Start run.sh, or a link to it."""
    above = project.parent
    environ = {"PATH": str(above / "bin"), "LOG": str(above / "log"), "PYTHON": str(above / "python")}
    return subprocess.Popen(
        [script or project / "scripts" / "run.sh", *args],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_two_first_runs_at_once_make_one_environment(project):
    for process in [run(project), run(project)]:
        code, out, err = ended(process)
        assert code == 0 and out.startswith("ran -n 8 "), err
    assert (project.parent / "log").read_text() == "made\n"
    assert ended(run(project))[0] == 0
    assert (project.parent / "log").read_text() == "made\n"


def test_a_link_to_a_script_is_as_good(project):
    link = project.parent / "train"
    link.symlink_to(project / "scripts" / "run.sh")
    code, out, err = ended(run(project, "--quiet", script=link))
    assert code == 0 and out.endswith("--scheme all --quiet\n"), err


@pytest.mark.parametrize(
    "mpi, words",
    [("system", "expected mpiexec on the PATH, found none"), ("lam", "expected mpich, openmpi or system")],
)
def test_a_missing_mpi_is_said_before_anything_is_made(project, mpi, words):
    code, out, err = ended(run(project, "--mpi", mpi))
    assert code == 2 and len(err.splitlines()) == 1 and words in err
    assert not (project.parent / "log").exists()
    assert [name for name in os.listdir(project) if name.startswith(".venv")] == []
