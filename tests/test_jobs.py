"""Whole jobs, as a user starts them: what they print, how they end, and that they never hang."""

import json
import os
import signal
import stat
import sys
import time

import numpy as np
import pytest
from conftest import DATA, finish, mpiexec, start

from zero_mpi.train import parser

pytestmark = pytest.mark.launches

MODULE = ("-m", "zero_mpi")


def test_all_schemes_on_eight_ranks_print_the_specs_table(launch):
    job = launch(8, *MODULE, "--scheme", "all", "--precision", "fp32")
    assert job.code == 0, job.err
    lines = [line.split() for line in job.out.splitlines()]
    for name in (["data", "parallel"], ["ZeRO-1"], ["ZeRO-2"], ["ZeRO-3"]):
        (row,) = [line for line in lines if line[: len(name)] == name and line[-4:-1] == ["10", "of", "10"]]
        assert row[len(name) : len(name) + 2] == ["1.021900", "0"]
    assert "FAILS" not in job.out
    assert max(map(len, job.out.splitlines())) <= 80


@pytest.mark.parametrize("n", [1, 3])
def test_json_has_all_evidence_with_units_in_its_names(launch, tmp_path, n):
    path = tmp_path / "out.json"
    job = launch(n, *MODULE, "--scheme", "zero3", "--dims", "7,5,3", "--json", path, "--quiet")
    assert job.code == 0, job.err
    assert job.out.splitlines()[0] == "Checks" and len(job.out.splitlines()) <= 9
    result = json.loads(path.read_text())
    assert result["schema"] == "zero_mpi.run/2" and result["exit_code"] == 0
    assert list(result["memory"]) == list(result["traffic"]) == ["dp", "zero3"]
    held = [sum(rank["held_bytes"].values()) for rank in result["memory"]["zero3"]["ranks"]]
    assert held == ([320, 304, 304] if n == 3 else [928])
    assert result["settings"]["n_params"] == 58 and result["environment"]["ranks"] == n
    assert [v["check"] for v in result["verdicts"]] == ["learning", "reference", "memory", "traffic"]
    assert os.listdir(tmp_path) == ["out.json"]


def test_real_digits_are_learned(launch):
    args = ["--data", DATA / "digits.npz", "--dims", "64,128,10", "--epochs", "3"]
    job = launch(4, *MODULE, "--scheme", "all", *args)
    assert job.code == 0, job.err
    text = " ".join(job.out.split())
    assert "1797 rows, shuffled by seed 7, 56 steps an epoch, 3 epochs, the last 5 rows of an epoch" in text
    assert "168 of 168" in text
    losses = text.split("loss by step: ")[1].split(" Why")[0].replace("(", "").replace(",", "").split()
    assert float(losses[-2]) < 0.2 * float(losses[0])


STALE = """
import sys
from zero_mpi.schemes import ZeRO1
ZeRO1.all_gather = lambda self, u, full: None
from zero_mpi.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_check_that_fails_is_said_and_exits_1(launch, tmp_path):
    script = tmp_path / "stale.py"
    script.write_text(STALE)
    job = launch(3, script, "--dims", "7,5,3", "--json", tmp_path / "out.json")
    assert job.code == 1, job.err
    assert "FAILS  learning   ZeRO-1 parts from data parallel in step 1" in job.out
    assert "FAILS  traffic    ZeRO-1, rank 0: step 1: all-gather: sent 0 B" in job.out
    assert "Why exactly zero" not in job.out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["exit_code"] == 1
    assert [v["check"] for v in result["verdicts"] if not v["holds"]] == ["learning", "traffic"]


def test_a_loss_that_is_not_finite_is_one_line_and_exit_1(launch):
    job = launch(3, *MODULE, "--lr", "1e30", "--precision", "fp32")
    assert job.code == 1
    assert len(job.complaints) == 1 and "in step 2 of data parallel" in job.complaints[0], job.err
    assert "Traceback" not in job.err and "Checks" not in job.out


def test_seeds_and_settings_reach_the_run(launch, tmp_path):
    digests = set()
    for i, args in enumerate(
        [[], ["--init-seed", "1"], ["--seed", "8"], ["--lr", "0.02"], ["--batch", "3"], ["--steps", "9"]]
    ):
        path = tmp_path / f"{i}.json"
        job = launch(1, *MODULE, "--dims", "7,5,3", "--scheme", "dp", "--json", path, *args)
        assert job.code == 0, job.err
        digests.add(json.loads(path.read_text())["learning"]["schemes"]["dp"]["theta_digest"])
    assert len(digests) == 6


def test_a_sweep_runs_each_size_and_checks_each(launch, tmp_path):
    path = tmp_path / "out.json"
    job = launch(4, *MODULE, "--sweep", "1,3,2", "--dims", "7,5,3", "--json", path)
    assert job.code == 0, job.err
    assert max(map(len, job.out.splitlines())) <= 80
    assert "holds  traffic    at N = 1, 2, 3" in job.out
    rows = json.loads(path.read_text())["sweep"]
    assert [row["ranks"] for row in rows] == [1, 2, 3]
    held = [sum(rank["held_bytes"].values()) for rank in rows[2]["memory"]["zero3"]["ranks"]]
    assert held == [320, 304, 304]


def test_a_sweep_over_a_file_says_what_each_size_makes_of_it(launch, tmp_path):
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.ones((40, 7), np.float32), y=np.ones((40, 3), np.float32))
    job = launch(3, *MODULE, "--sweep", "1,3", "--data", path, "--dims", "7,5,3", "--last-batch", "keep")
    assert job.code == 0, job.err
    text = " ".join(job.out.split())
    assert "N = 1: 5 steps an epoch, 1 epoch; N = 3: 2 steps an epoch, 1 epoch, the last 16 rows" in text
    assert "training 5 or 2 steps, 8 rows a rank and step" in text


def test_a_scheme_alone_in_its_order_runs_beside_one_that_shares_it(launch):
    argv = [
        *MODULE,
        "--scheme",
        "zero2",
        "--accumulate",
        "3",
        "--dims",
        "7,5,3",
        "--no-reference",
        "--steps",
        "4",
    ]
    job = launch(3, *argv, "--inject", "neighbours-gradient", "--precision", "fp32")
    assert job.code == 1, job.out
    assert "FAILS  learning   ZeRO-2 parts from ZeRO-3 in step 1" in job.out


WIDE = {
    "odd blocks": (
        "--reduction",
        "recursive-halving",
        "--freeze",
        "1",
        "--accumulate",
        "123",
        "--batch",
        "1",
    ),
    "fractions": ("--sweep", "1,2,3", "--accumulate", "3", "--freeze", "2", "--precision", "fp32"),
    "library": ("--reduction", "library", "--sweep", "1,3"),
    "naive": ("--reduction", "naive", "--sweep", "1,3"),
}


@pytest.mark.parametrize("argv", WIDE.values(), ids=WIDE)
def test_tables_fit_into_80_columns(launch, argv):
    job = launch(3, *MODULE, "--dims", "5,70,73,3", "--steps", "2", *argv)
    # Some launchers add a notice of their own where a check fails.
    assert "zero_mpi" not in job.err and max(map(len, job.out.splitlines())) <= 80, job.out
    if "--sweep" in argv and "--reduction" in argv:
        assert "max |θ-θ_ring|" in job.out and "ring's order" in " ".join(job.out.split())
        assert ("calls of the MPI library" in job.out) == ("library" in argv)


def test_every_option_is_in_the_json(launch, tmp_path):
    path = tmp_path / "out.json"
    argv = ["--optimizer", "sgd", "--momentum", "0.90000001", "--loss-scale", "65537.0625", "--lr", "0.001"]
    job = launch(2, *MODULE, "--dims", "7,5,3", "--steps", "2", "--json", path, *argv)
    assert job.code == 0, job.err
    said = json.loads(path.read_text())["settings"]
    expected = {
        "dims": [7, 5, 3],
        "optimizer": "sgd",
        "momentum": 0.90000001,
        "weight_decay": 0.0,
        "loss_scale": "fixed",
        "loss_scale_initial": 65537.0625,
        "last_batch": "drop",
        "epochs": None,
        "audit_memory": False,
    }
    assert {name: said[name] for name in expected} == expected


def test_a_sweep_names_a_formula_only_where_it_is_true_at_every_size(launch):
    # Recursive halving on three ranks sends more than 2(N-1)/N vectors.
    for sizes, title in (("2,4", "2(N-1)/N"), ("2,3", "formula")):
        job = launch(4, *MODULE, "--sweep", sizes, "--dims", "7,5,3", "--reduction", "recursive-halving")
        assert job.code == 0, job.err
        heads = [line.split() for line in job.out.splitlines() if line.split()[:2] == ["N", "DP"]]
        assert heads[0][4] == title


def test_a_sweep_that_fails_at_one_size_says_which(launch, tmp_path):
    script = tmp_path / "stale.py"
    script.write_text(STALE)
    job = launch(2, script, "--sweep", "1,2", "--dims", "7,5,3", "--quiet")
    assert job.code == 1, job.err
    assert "holds  memory     at N = 1, 2" in job.out
    assert "FAILS  traffic    N = 2: ZeRO-1, rank 0" in job.out
    assert "holds  learning   N = 1" in job.out or "FAILS  learning   N = 1" in job.out


def test_no_check_runs_the_named_scheme_alone(launch):
    job = launch(2, *MODULE, "--scheme", "zero2", "--no-check")
    assert job.code == 0, job.err
    assert "ZeRO-2" in job.out and "data parallel" not in job.out
    assert "not checked" in job.out and "holds  traffic" in job.out and "reference" not in job.out


def test_no_reference_leaves_the_replay_out_and_the_rest_in(launch, tmp_path):
    job = launch(2, *MODULE, "--no-reference", "--dims", "7,5,3", "--json", tmp_path / "out.json")
    assert job.code == 0, job.err
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["learning"]["reference"] is None
    assert [v["check"] for v in result["verdicts"]] == ["learning", "memory", "traffic"]
    assert "Checked, not claimed" not in job.out


def test_an_audit_and_the_options_of_training_reach_the_run(launch, tmp_path):
    path = tmp_path / "out.json"
    args = ["--audit-memory", "--accumulate", "2", "--optimizer", "sgd", "--momentum", "0.9", "--freeze", "0"]
    args += ["--clip-norm", "0.5", "--loss-scale", "8", "--reduction", "rank-order", "--steps", "3"]
    args += ["--schedule", "cosine", "--warmup", "1", "--reduce-every", "step", "--grad-dtype", "float32"]
    job = launch(3, *MODULE, "--dims", "7,5,3", "--json", path, *args)
    assert job.code == 0, job.err
    result = json.loads(path.read_text())
    assert [v["check"] for v in result["verdicts"]] == ["learning", "reference", "memory", "traffic", "audit"]
    assert result["learning"]["reducer"] == "rank-order"
    row = result["learning"]["schemes"]["zero3"]
    assert len(row["grad_norms"]) == 3 and row["final_loss_scale"] == 8 and row["reduce_every"] == "step"
    # 2 B of parameters; for unit 1 alone, 18 of 58, 4 B of gradients and 4 + 4 of master and momentum.
    assert result["memory"]["dp"]["mean_bytes_per_param"] == pytest.approx(2 + 12 * 18 / 58)
    text = " ".join(job.out.split())
    assert "3 steps of 2 micro-batches of 8 rows a rank; SGD lr 0.01, momentum 0.9" in text
    assert "frozen units 0" in text and "Audit: bytes that" in text


def test_the_librarys_own_sums_are_not_judged(launch):
    job = launch(3, *MODULE, "--dims", "7,5,3", "--reduction", "library")
    assert job.code == 0, job.err
    assert "n/a    traffic    not counted" in job.out and "holds  memory" in job.out
    job = launch(2, *MODULE, "--reduction", "library", "--reduce-dtype", "float16")
    assert job.code == 2 and "expected a reduce dtype that MPI can sum" in job.complaints[0]


def test_a_naive_sum_fails_traffic_and_exits_1(launch):
    job = launch(3, *MODULE, "--dims", "7,5,3", "--reduction", "naive", "--precision", "fp32")
    assert job.code == 1
    text = " ".join(job.out.split())
    assert "FAILS traffic data parallel, rank 0: step 1: reduce-scatter: sent 464 B, formula 152 B" in text
    assert "naive adds in the order of ranks 0, 1, ..., N-1" in text and "holds learning" in text


def test_the_library_is_enough_for_a_script(launch, tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "import numpy as np\n"
        "from mpi4py import MPI\n"
        "from zero_mpi.model import MLP\n"
        "from zero_mpi.schemes import SCHEMES\n"
        "for S in SCHEMES:\n"
        "    s = S(MLP((7, 5, 3)), MPI.COMM_WORLD)\n"
        "    loss = s.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))\n"
        "    if MPI.COMM_WORLD.rank == 0:\n"
        "        print(s.name, loss, s.bytes_per_param(), s.bytes_comm_per_rank(), s.full_theta().shape)\n"
        "    else:\n"
        "        s.full_theta()\n"
    )
    job = launch(3, script)
    assert job.code == 0, job.err
    assert job.out.count("(58,)") == 4


@pytest.mark.parametrize("count, rank", [("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")])
@pytest.mark.parametrize("number", [0, 2])
def test_case_alone_in_a_world_of_one_is_said_by_one_process(count, rank, number):
    from mpi4py import MPI

    if "Open MPI" in MPI.Get_library_version():
        # Its own variables would be believed; another launcher's are the mismatch.
        count, rank = "PMI_SIZE", "PMI_RANK"
    process = start([sys.executable, *MODULE], **{count: "4", rank: str(number)})
    job = finish(process)
    assert job.code == 2
    assert len(job.complaints) == (number == 0), job.err
    if number == 0:
        assert "started 4 processes, but each sees an MPI world of 1" in job.complaints[0]
    assert "Traceback" not in job.err and "suspicious" not in job.err


def test_settings_that_differ_between_ranks_are_named(launch):
    command = [mpiexec()]
    for steps in ("3", "4"):
        command += ["-n", "1", sys.executable, *MODULE, "--steps", steps, ":"]
    job = finish(start(command[:-1]))
    assert job.code == 2
    assert job.complaints == [
        "zero_mpi: error: --steps: expected the same on every rank, got 3 on rank 0 and 4 on rank 1"
    ]


def test_data_that_differ_between_ranks_are_named(tmp_path):
    x, y = np.ones((40, 7), np.float32), np.ones((40, 3), np.float32)
    command = [mpiexec()]
    for rank, rows in enumerate((x, 2 * x)):
        (tmp_path / str(rank)).mkdir()
        np.savez(tmp_path / str(rank) / "d.npz", x=rows, y=y)
        run_there = f"import os, runpy, sys; os.chdir({str(tmp_path / str(rank))!r}); "
        run_there += "sys.argv[0] = 'zero_mpi'; runpy.run_module('zero_mpi', run_name='__main__')"
        command += ["-n", "1", sys.executable, "-c", run_there, "--data", "d.npz", "--dims", "7,3", ":"]
    job = finish(start(command[:-1]))
    assert job.code == 2
    assert len(job.complaints) == 1 and "rows of --data (d.npz): expected the same" in job.complaints[0], (
        job.err
    )


def test_a_terminal_without_theta_loses_no_evidence(launch, tmp_path):
    path = tmp_path / "out.json"
    job = launch(2, *MODULE, "--dims", "7,5,3", "--json", path, PYTHONIOENCODING="ascii")
    assert job.code == 0, job.err
    assert "max |?-?_dp|" in job.out and json.loads(path.read_text())["exit_code"] == 0


FAILING = """
import os, signal, sys, time
import numpy as np
from zero_mpi.comm import Communicator
from zero_mpi.model import MLP
from zero_mpi.schemes import SCHEMES
how, phase, key = sys.argv[1:]
comm = Communicator()
with comm.ending_job_on_error():
    (S,) = [S for S in SCHEMES if S.key == key]
    scheme = S(MLP((7, 5, 3)), comm)
    def fail():
        if comm.rank == 1 and scheme.steps_done >= 2:
            sys.stderr.write(f"failing at {time.time()}\\n")
            sys.stderr.flush()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 had enough")
    def before(method):
        def call(*args):
            fail()
            return method(*args)
        return call
    name = {"forward": "full_params", "backward": "grad_ready", "update": "update"}[phase]
    setattr(scheme, name, before(getattr(scheme, name)))
    for _ in range(100000):
        scheme.step((np.ones((2, 7), np.float32), np.ones((2, 3), np.float32)))
"""


@pytest.mark.parametrize("how", ["raises", "killed"])
@pytest.mark.parametrize("phase, key", [("forward", "zero3"), ("backward", "zero2"), ("update", "zero1")])
def test_one_rank_that_fails_ends_the_job_within_5_s(launch, tmp_path, how, phase, key):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    job = launch(3, script, how, phase, key, timeout_s=40)
    ended = time.time()
    failed = next(float(line.split()[2]) for line in job.err.splitlines() if line.startswith("failing at"))
    assert job.code != 0
    assert ended - failed < 5
    if how == "raises":
        assert "zero_mpi: rank 1 failed:" in job.err and "rank 1 had enough" in job.err


ALONE = """
import os, signal, sys
from zero_mpi.cli import main
from zero_mpi.model import MLP
error, rank, place = sys.argv[1:4]
errors = {"value": ValueError("only here"), "float": FloatingPointError("only here"),
          "interrupt": KeyboardInterrupt(), "exit": SystemExit(3)}
original, calls = getattr(MLP, place), [0]
def alone(self, *args, **kwargs):
    from mpi4py import MPI
    calls[0] += 1
    if MPI.COMM_WORLD.rank == int(rank) and calls[0] > 2:
        raise errors[error]
    return original(self, *args, **kwargs)
setattr(MLP, place, alone)
sys.exit(main(sys.argv[4:]))
"""


@pytest.mark.parametrize("sweep", [[], ["--sweep", "2"]], ids=["all", "sweep"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", ["value", "float", "interrupt", "exit"])
def test_any_error_of_one_rank_in_training_ends_the_command_line(launch, tmp_path, error, rank, sweep):
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    job = launch(3, script, error, rank, "backward", "--dims", "7,5,3", *sweep, timeout_s=30)
    assert job.code != 0
    assert not job.complaints and "Checks" not in job.out
    if error in ("value", "float"):
        assert f"zero_mpi: rank {rank} failed:" in job.err and "only here" in job.err


@pytest.mark.parametrize("sweep", [[], ["--sweep", "2"], ["--sweep", "1,2,3"]], ids=" ".join)
def test_a_mistake_in_set_up_is_one_line_in_a_sweep_too(launch, tmp_path, sweep):
    script = tmp_path / "weights.py"
    script.write_text(
        "import sys\n"
        "from zero_mpi.cli import main\n"
        "from zero_mpi.model import MLP\n"
        "def init(self, seed):\n"
        "    raise ValueError('no weights here')\n"
        "MLP.init = init\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    job = launch(3, script, "--dims", "7,5,3", *sweep, timeout_s=30)
    assert job.code == 2
    assert len(job.complaints) == 1 and "no weights here" in job.complaints[0], job.err


def test_json_never_replaces_what_is_no_regular_file(launch, tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    link.symlink_to(target)
    target.write_text("old")
    target.chmod(0o600)
    job = launch(1, *MODULE, "--dims", "7,5,3", "--steps", "1", "--json", pipe)
    assert job.code == 2 and "expected a regular file" in job.complaints[0]
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)
    job = launch(1, *MODULE, "--dims", "7,5,3", "--steps", "1", "--json", link)
    assert job.code == 0, job.err
    assert link.is_symlink() and json.loads(target.read_text())["exit_code"] == 0
    assert stat.S_IMODE(os.stat(target).st_mode) == 0o600
    target.chmod(0o444)
    job = launch(1, *MODULE, "--dims", "7,5,3", "--steps", "1", "--json", target)
    assert job.code == 2 and "read-only" in job.complaints[0]


def test_a_killed_rank_of_the_command_line_ends_the_job():
    process = start([mpiexec(), "-n", "3", sys.executable, *MODULE, "--steps", "100000", "--dims", "7,5,3"])
    try:
        deadline = time.time() + 30
        children = []
        while time.time() < deadline and len(children) < 3:
            children = [
                int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _is_rank(int(pid), process.pid)
            ]
            time.sleep(0.2)
        assert len(children) == 3
        time.sleep(2)
        os.kill(children[1], signal.SIGKILL)
        began = time.time()
        job = finish(process, timeout_s=20)
        assert job.code != 0 and time.time() - began < 5
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_rank(pid, ancestor):
    """Return whether `pid` is one of our Python ranks below `ancestor`."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if b"zero_mpi\0--steps\0" not in file.read() or pid == ancestor:
                return False
        while pid > 1:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rsplit(")", 1)[1].split()[1])
            if pid == ancestor:
                with open(f"/proc/{ancestor}/cmdline", "rb") as file:
                    return True
    except (FileNotFoundError, ProcessLookupError):
        pass
    return False


@pytest.fixture
def no_mpi(tmp_path):
    """Return an environment in which mpi4py is installed and finds no MPI library."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library\\nlibmpi.so: nowhere')\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_help_fits_a_screen_and_needs_no_mpi(no_mpi):
    job = finish(start([sys.executable, *MODULE, "--help"], **no_mpi))
    assert job.code == 0
    lines = job.out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert sum("mpiexec -n" in line for line in lines) >= 4
    for option in parser()._option_string_actions:
        assert option in job.out or option == "-h"


def test_version():
    job = finish(start([sys.executable, *MODULE, "--version"]))
    assert job.code == 0 and job.out.startswith("zero_mpi ")


def test_no_mpi_library_names_the_extras(no_mpi):
    job = finish(start([sys.executable, *MODULE], **no_mpi))
    assert job.code == 2
    assert len(job.complaints) == 1 and "pip install 'zero_mpi[mpich]'" in job.complaints[0], job.err
    assert "Traceback" not in job.err


OWN_SIGNALS = """
import os, signal, subprocess, sys, time
from zero_mpi.comm import Communicator

came, woken = [], os.pipe()
os.set_blocking(woken[1], False)
signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
signal.signal(signal.SIGCHLD, lambda number, frame: came.append(number))
signal.set_wakeup_fd(woken[1])
with Communicator().ending_job_on_error():
    os.kill(os.getpid(), signal.SIGUSR1)
    subprocess.run(["true"], check=True)
    # A program may see to SIGTERM itself, later too.
    mine = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    print([signal.Signals(number).name for number in came], list(os.read(woken[0], 99)))
print(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
"""


def test_signals_that_a_program_handles_itself_end_nothing(tmp_path):
    (tmp_path / "own.py").write_text(OWN_SIGNALS)
    job = finish(start([sys.executable, str(tmp_path / "own.py")]), timeout_s=30)
    assert (job.code, job.err) == (0, "")
    names, read = job.out.splitlines()[0].split("] [")
    assert names == "['SIGUSR1', 'SIGCHLD', 'SIGTERM'"
    # Who was woken by signals before still is.
    assert read == "10, 17, 15]"
    assert job.out.splitlines()[1] == "True"


@pytest.mark.parametrize("ranks", [1, 2])
def test_words_that_a_program_exits_with_are_said(tmp_path, ranks):
    text = "import sys\nfrom zero_mpi.comm import Communicator\ncomm = Communicator()\n"
    text += "with comm.ending_job_on_error():\n"
    text += "    sys.exit('no disk left' if comm.rank == comm.size - 1 else comm.allgather_scalar(1))\n"
    (tmp_path / "exits.py").write_text(text)
    command = [mpiexec(), "-n", str(ranks), sys.executable, str(tmp_path / "exits.py")]
    job = finish(start(command), timeout_s=30)
    assert job.code == 1
    said = [line for line in job.err.splitlines() if line.startswith("zero_mpi:")]
    assert said == [f"zero_mpi: rank {ranks - 1}: no disk left"]


def test_a_sweep_says_of_each_size_how_families_part(launch, tmp_path):
    path = tmp_path / "out.json"
    args = ["--sweep", "2,3", "--accumulate", "2", "--dims", "7,5,3", "--quiet", "--json", path]
    job = launch(3, *MODULE, *args)
    text = " ".join(job.out.split())
    assert "holds reference at N = 2, 3" in text and "holds learning at N" not in text
    assert [f"N = {n}: the same bits after each of 10 steps" in text for n in (2, 3)] == [True, True]
    rows = json.loads(path.read_text())["sweep"]
    assert [("process" in row, "memory" in row) for row in rows] == [(False, True)] * 2


def test_a_run_that_fails_leaves_the_certificate_of_the_steps_before(launch, tmp_path):
    path = tmp_path / "run.json"
    path.write_text("that of another run")
    job = launch(2, *MODULE, "--inject", "nan", "--dims", "7,5,3", "--certificate", path, "--scheme", "zero2")
    assert job.code == 1 and "in step 3 of ZeRO-2" in job.complaints[0]
    chains = json.loads(path.read_text())["chains"]
    assert {name: [link["step"] for link in links] for name, links in chains.items()} == {
        "dp": [0, 1, 2],
        "zero2": [0, 1, 2],
    }


@pytest.mark.parametrize(
    "args",
    [
        ("--accumulate", "4", "--reduce-every", "micro-batch"),
        ("--reduce-dtype", "bfloat16", "--batch", "1", "--optimizer", "sgd"),
        ("--precision", "bf16", "--reduce-dtype", "bfloat16", "--accumulate", "4"),
        ("--reduce-dtype", "float64", "--accumulate", "2"),
    ],
)
def test_the_audit_holds_where_dtypes_are_mixed(launch, args):
    job = launch(2, *MODULE, "--audit-memory", "--steps", "2", "--no-check", *args)
    assert job.code == 0 and "holds  audit" in job.out, job.out


def test_the_replays_zero_is_not_oversold_in_16_bits(launch):
    for precision, reserved in (("mixed", True), ("fp32", False)):
        text = " ".join(launch(2, *MODULE, "--dims", "7,5,3", "--precision", precision).out.split())
        assert "Checked, not claimed" in text and ("cannot tell orders apart" in text) == reserved


@pytest.mark.launches
@pytest.mark.parametrize("size", [3, 4])
def test_ranks_out_of_step_end_where_each_has_a_core_of_its_own(tmp_path, size):
    script = tmp_path / "many_cores.py"
    script.write_text(
        "import sys\n"
        "from zero_mpi import cli, transport\n"
        "transport._ranks_per_core_of = lambda host: host.Free() or 1.0\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = [mpiexec(), "-n", str(size), sys.executable, script, "--inject", "unit-order", "--quiet"]
    job = finish(start(words), timeout_s=60)
    assert job.code == 1 and len(job.complaints) == 1
    assert "ranks hand units over in different orders" in job.complaints[0]
