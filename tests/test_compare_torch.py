"""scripts/compare_torch.py where torch is missing; what it does with torch is in test_torch.py."""

import os

import pytest
from conftest import ROOT

pytestmark = pytest.mark.launches


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_torch_the_script_says_so_in_one_line(launch, tmp_path, ranks):
    # An entry of None makes `import torch` fail as if there were none.
    (tmp_path / "sitecustomize.py").write_text("import sys\n\nsys.modules['torch'] = None\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    job = launch(ranks, "scripts/compare_torch.py", PYTHONPATH=path)
    assert job.code == 2 and not job.out
    assert [line for line in job.err.splitlines() if "error" in line] == [
        "compare_torch: error: expected PyTorch, which is not installed here: pip install torch"
    ]
    assert "Traceback" not in job.err


def test_help_needs_no_torch_and_is_said_once(launch):
    job = launch(2, "scripts/compare_torch.py", "--help")
    assert job.code == 0, job.err
    assert job.out.count("usage: compare_torch.py") == 1 and "--certificate" in job.out
