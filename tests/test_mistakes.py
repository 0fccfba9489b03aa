"""Bad input and faults: each is one clear line from one rank, or ends the job within 5 s; never a hang.

Most rows of the table run one after another in a single job of three ranks (`many.py` below), which calls the
command line with each row's arguments. What ends a job, or needs another launcher, is a job of its own.
"""

import json
import os
import signal
import stat
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import DATA, finish, mpiexec, start

from zero_mpi.transport import open_mpi_launched_mpich

pytestmark = pytest.mark.launches

MODULE = ("-m", "zero_mpi")
DIGITS = ("--data", str(DATA / "digits.npz"), "--dims", "64,10")
BIG = str(2**31)
SCALED = ("--dims", "7,5,3", "--loss-scale", "dynamic")
VAST = ("--data", "@/vast.npz", "--dims", "3,2", "--batch", "1", "--steps", "3")


class Row(NamedTuple):
    """What a row asks for, and what has to come of it.

    argv : for all ranks, or a list of one for each rank; "@" stands for the directory of the files below.
    words : in the one line; or in what is printed where the exit code is 0. patch : a name in `many.py`.
    """

    argv: Any
    words: str
    code: int = 2
    patch: str = ""


def number(option, text, least=1):
    return Row((option, text), f"argument {option}: expected a whole number from {least} to 2147483647, got ")


def floating(text):
    return Row(("--lr", text), "argument --lr: expected a finite number above 0, got ")


def data(name, words, code=2, patch=""):
    return Row(("--data", f"@/{name}", "--dims", "3,2", "--batch", "1"), words, code, patch)


ROWS = {
    "an unknown option": Row(("--frobnicate",), "unrecognized arguments: --frobnicate"),
    "an abbreviated option": Row(("--step", "3"), "unrecognized arguments: --step 3"),
    "a stray word": Row(("all",), "unrecognized arguments: all"),
    "an option without its value": Row(("--scheme",), "argument --scheme: expected one argument"),
    "an unknown scheme": Row(("--scheme", "zero9"), "argument --scheme: invalid choice: 'zero9'"),
    "an unknown precision": Row(("--precision", "fp8"), "argument --precision: invalid choice: 'fp8'"),
    "an unknown wire dtype": Row(("--reduce-dtype", "int8"), "argument --reduce-dtype: invalid choice"),
    "a gather dtype too narrow": Row(
        ("--precision", "bf16", "--gather-dtype", "float16"),
        "gather dtype: expected one that holds bfloat16 parameters exactly, got float16",
    ),
    "a reduce dtype of too small a range": Row(
        ("--precision", "bf16", "--reduce-dtype", "float16"), "reduce dtype: expected one with the range of"
    ),
    "bfloat16 without its extra": Row(("--precision", "bf16"), "zero_mpi[bf16]", patch="no ml_dtypes"),
    "no steps": number("--steps", "0"),
    "negative steps": number("--steps", "-1"),
    "a half step": number("--steps", "1.5"),
    "steps in words": number("--steps", "ten"),
    "huge steps": number("--steps", BIG),
    "steps of 5000 digits": number("--steps", "9" * 5000),
    "empty steps": number("--steps", ""),
    "steps with an underscore": number("--steps", "1_0"),
    "steps in another script": number("--steps", "٣"),
    "no rows": number("--batch", "0"),
    "negative rows": number("--batch", "-8"),
    "rows in words": number("--batch", "all"),
    "huge rows": number("--batch", BIG),
    "rows beyond the memory": Row(("--batch", "2000000000"), "memory: expected a run that fits into the "),
    "no epochs": number("--epochs", "0"),
    "epochs of a stream": Row(("--epochs", "2"), "--epochs: expected --data FILE beside it"),
    "no rate": floating("0"),
    "a negative rate": floating("-0.1"),
    "a rate that is no number": floating("nan"),
    "an infinite rate": floating("inf"),
    "a rate in words": floating("fast"),
    "a rate beyond float64": floating("1e400"),
    "a rate with an underscore": floating("1_0"),
    "a rate in another script": floating("٠.١"),
    "a rate beyond float32": Row(
        ("--lr", "1e39"), "argument --lr: expected a number from 1.5e-45 to 3.4e+38, got '1e39'"
    ),
    "a rate below float32": Row(("--lr", "1e-300"), "argument --lr: expected a number from 1.5e-45 to"),
    "a loss scale without an inverse": Row(
        ("--loss-scale", "1e-45"), "argument --loss-scale: expected dynamic, none or a number from 3e-39 to"
    ),
    "a momentum with an underscore": Row(
        ("--optimizer", "sgd", "--momentum", "0.9_9"),
        "argument --momentum: expected a number from 0 to below 1, got '0.9_9'",
    ),
    "a file without a name": Row(("--data", ""), "data: expected an .npz file, got an empty name"),
    "more micro-batches than rows": Row(
        (
            "--data",
            "@/four.npz",
            "--dims",
            "3,2",
            "--batch",
            "1",
            "--accumulate",
            "5",
            "--last-batch",
            "keep",
        ),
        "--accumulate: expected at most the 4 rows of --data, got 5",
    ),
    "a fault beside frozen units": Row(
        ("--inject", "nan", "--freeze", "1"), "--inject nan: expected all units trained, got --freeze"
    ),
    "a fault that only learning shows": Row(
        ("--inject", "stale-gradient", "--no-check"), "expected checks that can see it, got --no-check"
    ),
    "a fault that only the reference shows": Row(
        ("--inject", "same-batch", "--no-reference"), "only the reference can see it, got --no-reference"
    ),
    "some ranks out of step on purpose, in a sweep": Row(
        ("--inject", "unit-order", "--sweep", "2,3", "--quiet"),
        "N = 2: ranks hand units over in different orders: rank ",
        1,
    ),
    "ranks out of step on purpose": Row(
        ("--inject", "unit-order", "--quiet"), "ranks hand units over in different orders: rank ", 1
    ),
    "a NaN in a comparison of orders, on two of three ranks": Row(
        ("orders", "--dims", "7,5,3", "--steps", "10"),
        "N = 2: loss: expected a finite number, got nan on rank 1 in step ",
        1,
        "NaN on rank 1",
    ),
    "a negative seed": number("--seed", "-1", least=0),
    "a huge seed": number("--seed", BIG, least=0),
    "an initial seed in words": number("--init-seed", "x", least=0),
    "one width": Row(("--dims", "5"), "argument --dims: expected at least two widths"),
    "no width": number("--dims", ""),
    "widths in words": number("--dims", "a,b"),
    "a width of zero": number("--dims", "5,0"),
    "a negative width": number("--dims", "5,-3"),
    "a width left out": number("--dims", "5,,3"),
    "widths beyond the memory": Row(
        ("--dims", "200000,200000"), "got one that needs at least 5520181200000 B there, for 3 ranks"
    ),
    "micro-batches beyond the memory": Row(
        ("--accumulate", "2000000000"), "memory: expected a run that fits"
    ),
    "more rows than the file has": Row(
        ("--data", "@/four.npz", "--dims", "3,2", "--batch", "2000000000", "--last-batch", "keep"),
        "1 step an epoch",
        0,
    ),
    "vectors beyond the memory": Row(
        ("bench", "--max-bytes", "4M"), "--max-bytes: expected a size that fits", patch="little memory"
    ),
    "sizes of 5000 digits": Row(
        ("bench", "--max-bytes", "9" * 5000), "argument --max-bytes: expected bytes such as 4096, 64K"
    ),
    "repeats in words": Row(
        ("bench", "--repeats", "many"), "argument --repeats: expected a whole number from 1 to 1000000"
    ),
    "a value where none goes": Row(("--quiet=1",), "argument --quiet: expected no value, got '1'"),
    "an audit of one step": Row(
        ("--audit-memory", "--steps", "1"), "--audit-memory: expected at least 2 steps"
    ),
    "a list of faults on one rank only": Row(
        [("faults", "--list"), ("faults",), ("faults",)], "--list: expected the same on every rank, got True"
    ),
    "JSON of faults on one rank only": Row(
        [("faults",), ("faults", "--json", "@/f.json"), ("faults",)],
        "--json: expected the same on every rank, got None on rank 0",
    ),
    "JSON of a list": Row(
        ("faults", "--list", "--json", "@/f.json"), "--json: expected faults to make, got --list"
    ),
    "certificates that differ between ranks": Row(
        [("compare", "a", "b"), ("compare", "a", "c"), ("compare", "a", "b")],
        "B.json: expected the same on every rank, got b on rank 0 and c on rank 1",
    ),
    "JSON into the certificate": Row(
        ("--json", "@/both.json", "--certificate", "@/./both.json"),
        "expected another file than that of --json",
    ),
    "JSON into the data": Row(
        ("--data", "@/good.npz", "--dims", "3,2", "--batch", "1", "--json", "@/good.npz"),
        "expected another file than that of --data, got the same",
    ),
    "a fault too late to be made": Row(
        ("--inject", "nan", "--steps", "2"), "--inject nan: expected at least 3 steps, got 2"
    ),
    "a fault in a unit that is not there": Row(
        ("--inject", "nan", "--dims", "5,3"), "--inject nan: expected at least 2 units, got 1"
    ),
    "a fault in another order of summation": Row(
        ("--inject", "nan", "--reduction", "naive"), "expected --reduction ring, got naive"
    ),
    "a fault without checks": Row(
        ("--inject", "same-batch", "--no-check"), "expected checks that can see it, got --no-check"
    ),
    "gradients of a dtype that fp32 has not": Row(
        ("--precision", "fp32", "--grad-dtype", "float16"),
        "grad dtype: expected float32 with precision fp32, got float16; precision mixed has",
    ),
    "a scale that falls to its floor, in JSON": Row(
        (*SCALED, "--lr", "1e5", "--steps", "60", "--json", "@/floor.json"), "1, may not fall below 1", 1
    ),
    "infinite losses, in a certificate": Row(
        (*VAST, "--loss-scale", "dynamic", "--certificate", "@/vast.json"), "not finite", 0
    ),
    "an infinite loss at a fixed scale": Row(
        (*VAST, "--loss-scale", "8"), "loss: expected a finite number, got inf on rank 0 in step 1", 1
    ),
    "rows beyond the memory, in orders": Row(
        ("orders", "--batch", "2000000000"), "smaller --dims or --batch, or more hosts"
    ),
    "widths beyond all memory": Row(("--dims", "2147483647,2147483647"), "memory: expected a run that fits"),
    "sizes beyond the memory": Row(("--dims", "200000,200000", "--sweep", "1,2"), "there, for 1 rank;"),
    "a sweep beyond the job": Row(
        ("--sweep", "1,4"), "--sweep: expected sizes up to the job's 3 ranks, got 4"
    ),
    "a sweep on no rank": number("--sweep", "0"),
    "a sweep in words": number("--sweep", "all"),
    "an empty sweep": number("--sweep", ""),
    "JSON without a name": Row(("--json", ""), "--json: expected a file to write, got an empty name"),
    "JSON into a directory": Row(("--json", "@"), "expected a file to write, got a directory"),
    "JSON into no directory": Row(("--json", "@/nowhere/o.json"), "cannot be written: No such file"),
    "JSON below a file": Row(("--json", "@/text.npz/o.json"), "cannot be written: Not a directory"),
    "JSON of too long a name": Row(("--json", "@/" + 300 * "n"), "cannot be written: File name too long"),
    "JSON into a read-only file": Row(("--json", "@/read-only.json"), "that can be written, got a read-only"),
    "JSON in a read-only directory": Row(
        ("--json", "@/read-only/o.json"), "cannot be written: its directory is read-only"
    ),
    "JSON over a file in a read-only directory": Row(
        ("--json", "@/read-only/there.json"), "cannot be written: its directory is read-only"
    ),
    "JSON into a pipe": Row(("--json", "@/pipe"), "expected a regular file to write, got a device or a pipe"),
    "JSON of a name with a line break": Row(("--json", "@/no\nwhere/o"), "no\\nwhere/o: cannot be written"),
    "a missing file": data("nowhere.npz", "nowhere.npz: No such file or directory"),
    "a directory": data("read-only", "expected an .npz file, got a directory"),
    "a pipe": data("pipe", "expected an .npz file, got a device or a pipe"),
    "a file of text": data("text.npz", "got one that is damaged, truncated or of another kind"),
    "an empty file": data("empty.npz", "got one that is damaged, truncated or of another kind"),
    "a truncated zip": data("truncated.npz", "got one that is damaged, truncated or of another kind"),
    "a file without permission": data("good.npz", "good.npz: Permission denied", patch="no permission"),
    "a file larger than memory": data("good.npz", "that fit into memory", patch="no memory to load"),
    "one bare array": data("bare.npy", "got one bare array"),
    "a name with a line break": data("no\nwhere.npz", "no\\nwhere.npz: No such file or directory"),
    "a name of no text": data("no\udcffwhere.npz", "no\\udcffwhere.npz: No such file or directory"),
    "no x": data("no x.npz", "expected arrays x and y, got y"),
    "no y": data("no y.npz", "expected arrays x and y, got x"),
    "no arrays": data("none.npz", "expected arrays x and y, got none"),
    "arrays without rows": data("no rows.npz", "x: expected shape (rows, 3), got (0, 3)"),
    "object arrays": data("objects.npz", "x: expected numbers, got Python objects, which are never loaded"),
    "ragged rows": data("ragged.npz", "x: expected numbers, got Python objects, which are never loaded"),
    "complex numbers": data("complex.npz", "x: expected real numbers, got complex64"),
    "words for numbers": data("words.npz", "x: expected real numbers, got <U1"),
    "a NaN": data("nan.npz", "x: expected finite float32 numbers, got NaN or infinity in row 4"),
    "an infinity": data("inf.npz", "y: expected finite float32 numbers, got NaN or infinity in row 5"),
    "numbers beyond float32": data("beyond.npz", "y: expected finite float32 numbers, got a number beyond"),
    "x of one dimension": data("flat.npz", "x: expected shape (rows, 3), got (9,)"),
    "y of three dimensions": data("deep.npz", "y: expected shape (rows, 2), got (9, 2, 1)"),
    "x that does not fit the model": data("wide x.npz", "x: expected 3 columns, the first of --dims, got 4"),
    "y that does not fit the model": data("wide y.npz", "y: expected 2 columns, the last of --dims, got 4"),
    "more rows in x": data("short y.npz", "expected as many rows in y as in x, got 9 in x and 8 in y"),
    "fewer rows than a global batch": Row(
        (*DIGITS, "--batch", "1000"), "expected at least 3000 rows, a global batch of 3 x 1000, got 1797"
    ),
    "integers": data("integers.npz", "converted: x int64 -> float32", code=0),
    "truth values and float64": data(
        "bools.npz", "converted: x float64 -> float32, y bool -> float32", code=0
    ),
    "one option on one rank": Row(
        [("--steps", "3"), ("--steps", "3"), ("--steps", "4")],
        "--steps: expected the same on every rank, got 3 on rank 0 and 4 on rank 2",
    ),
    "a mistake on one rank only": Row(
        [(), ("--steps", "0"), ()], "argument --steps: expected a whole number"
    ),
    "help on one rank only": Row(
        [(), ("--help",), ()],
        "--help or --version: expected the same on every rank, got neither on rank 0 and",
    ),
    "rows that differ between ranks": Row(
        ("--data", "@/good.npz", "--dims", "3,2", "--batch", "1"),
        "rows of --data (@/good.npz): expected the same on every rank",
        patch="other rows on rank 2",
    ),
    "a file missing on one rank": data("good.npz", "good.npz: No such file", patch="no file on rank 2"),
    "initial weights that differ between ranks": Row(
        (), "initial weights: expected the same on every rank", patch="other weights on rank 2"
    ),
    "no memory for the weights": Row((), "Unable to allocate", patch="no memory for weights on rank 1"),
    "a loss that becomes NaN": Row(
        ("--steps", "5"), "got nan on rank 1 in step 3 of data parallel", 1, "NaN on rank 1"
    ),
    "a loss that becomes infinite": Row(
        ("--steps", "5"), "got inf on rank 1 in step 3 of ZeRO-2", 1, "infinity on rank 1"
    ),
    "a loss that becomes NaN, in JSON": Row(
        ("--steps", "5", "--json", "@/failed.json"), "got nan on rank 1 in step 3", 1, "NaN on rank 1"
    ),
    "a disk that fills up at the end": Row(
        ("--json", "@/new.json", "--quiet"), "new.json: No space left on device", patch="disk full"
    ),
    "a rate that overflows": Row(
        ("--lr", "3e38", "--precision", "fp32"), "loss: expected a finite number, got nan on rank 0", 1
    ),
    "weights that overflow in the last step": Row(
        ("--lr", "3e38", "--precision", "mixed", "--steps", "1"),
        "weights: expected finite numbers, got NaN",
        1,
    ),
    "a loss that becomes NaN in a sweep": Row(
        ("--sweep", "1,2", "--steps", "5"),
        "N = 2: loss: expected a finite number, got nan on rank 1 in step 3",
        1,
        "NaN on rank 1",
    ),
    "sixty widths": Row(("--dims", ",".join(60 * ["4"]), "--steps", "1"), "in 59 units", 0),
    "one of each": Row(
        ("--dims", "5,3", "--steps", "1", "--batch", "1"),
        "in 1 unit, seed 0 data random normal, seed 7 training 1 step, 1 row a rank and step",
        0,
    ),
    "a file of one step an epoch": data(
        "four.npz", "4 rows, shuffled by seed 7, 1 step an epoch, 1 epoch, the last row of an epoch", 0
    ),
    "huge losses": Row(
        ("--data", "@/huge.npz", "--dims", "3,2", "--batch", "1", "--precision", "fp32"), "e+34", 0
    ),
    "a long name": data(f"{200 * 'n'}.npz", "nnn", 0),
    "a numpy without BLAS": Row(("--steps", "1"), "unknown BLAS", 0, "no BLAS"),
}

MANY = '''
import contextlib, io, itertools, json, os, sys, time, warnings
from unittest import mock
import numpy as np
from zero_mpi import bench, cli, report
from zero_mpi.comm import Communicator
from zero_mpi.model import MLP

comm = Communicator()
rows, folder, result = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3]
load, init, loss = np.load, MLP.init, MLP.loss

def raises(error, rank=None):
    def function(*args, **kwargs):
        if rank in (None, comm.rank):
            raise error
        return load(*args, **kwargs)
    return function

def changed(value, due):
    """Return an MLP.loss that gives `value` on rank 1 in call number `due`: four schemes, step by step."""
    calls = itertools.count(1)
    def function(self, y_hat, y):
        right, dy = loss(self, y_hat, y)
        return (value if comm.rank == 1 and next(calls) == due else right), dy
    return function

def other_weights(self, seed=0):
    yield from init(self, seed + (comm.rank == 2))

def no_weights(self, seed=0):
    if comm.rank == 1:
        np.empty(2**60, np.uint8)
    yield from init(self, seed)

def other_rows(*args, **kwargs):
    arrays = load(*args, **kwargs)
    if comm.rank == 2:
        arrays = dict(arrays)
        arrays["x"] = arrays["x"] + 1
        made = io.BytesIO()
        np.savez(made, **arrays)
        made.seek(0)
        return load(made)
    return arrays

PATCHES = {
    "": lambda: contextlib.nullcontext(),
    "no ml_dtypes": lambda: mock.patch.dict(sys.modules, ml_dtypes=None),
    "no permission": lambda: mock.patch.object(np, "load", raises(PermissionError(13, "Permission denied"))),
    "no memory to load": lambda: mock.patch.object(np, "load", raises(MemoryError())),
    "no file on rank 2": lambda: mock.patch.object(
        np, "load", raises(FileNotFoundError(2, "No such file or directory"), 2)
    ),
    "other rows on rank 2": lambda: mock.patch.object(np, "load", other_rows),
    "other weights on rank 2": lambda: mock.patch.object(MLP, "init", other_weights),
    "no memory for weights on rank 1": lambda: mock.patch.object(MLP, "init", no_weights),
    "NaN on rank 1": lambda: mock.patch.object(MLP, "loss", changed(float("nan"), 9)),
    "infinity on rank 1": lambda: mock.patch.object(MLP, "loss", changed(float("inf"), 11)),
    "disk full": lambda: mock.patch.object(report.json, "dump", lambda *a, **k: full()),
    "little memory": lambda: mock.patch.object(bench, "physical_bytes", lambda: 2**20),
    "no BLAS": lambda: mock.patch.object(np, "show_config", lambda mode: {"Build Dependencies": {}}),
}

def full(*args, **kwargs):
    raise OSError(28, "No space left on device")

outcomes = {}
for name, (per_rank, patch) in rows.items():
    argv = per_rank[comm.rank]
    if comm.rank == 0:
        with open(result + ".now", "w") as file:
            file.write(name)
    before = sorted(os.listdir(folder)) if comm.rank == 0 else None
    out, err = io.StringIO(), io.StringIO()
    warnings.simplefilter("always")
    comm.allgather_scalar(0)
    began = time.time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), PATCHES[patch]():
        code = cli.main(argv)
    mine = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "elapsed_s": time.time() - began}
    mine["left"] = comm.rank == 0 and before != sorted(os.listdir(folder))
    outcomes[name] = comm.allgather_object(mine)
if comm.rank == 0:
    with open(result, "w") as file:
        json.dump(outcomes, file)
'''


def write_files(folder):
    """Make the files that rows name."""
    x, y = np.arange(27, dtype=np.float32).reshape(9, 3), np.ones((9, 2), np.float32)
    objects = np.array([[Opens(folder / "opened")] * 3] * 9, object)
    ragged = np.empty(9, object)
    ragged[:] = [[1] * (1 + i % 2) for i in range(9)]
    nan, inf = x.copy(), y.copy()
    nan[4, 2], inf[5, 0] = np.nan, -np.inf
    for name, arrays in {
        "good": {"x": x, "y": y},
        "no x": {"y": y},
        "no y": {"x": x},
        "none": {},
        "no rows": {"x": x[:0], "y": y[:0]},
        "objects": {"x": objects, "y": y},
        "ragged": {"x": ragged, "y": y},
        "complex": {"x": x.astype(np.complex64), "y": y},
        "words": {"x": np.full((9, 3), "a"), "y": y},
        "nan": {"x": nan, "y": y},
        "inf": {"x": x, "y": inf},
        "beyond": {"x": x, "y": y * np.float64(1e300)},
        "flat": {"x": x[:, 0], "y": y},
        "deep": {"x": x, "y": y[:, :, None]},
        "wide x": {"x": np.ones((9, 4)), "y": y},
        "wide y": {"x": x, "y": np.ones((9, 4))},
        "short y": {"x": x, "y": y[:8]},
        "integers": {"x": np.arange(27).reshape(9, 3) % 5, "y": y},
        "four": {"x": x[:4], "y": y[:4]},
        "huge": {"x": x / 9, "y": y * np.float32(1e17)},
        "vast": {"x": x * np.float32(1e20), "y": y},
        200 * "n": {"x": x, "y": y},
        "bools": {"x": x.astype(float) / 9, "y": y > 0},
    }.items():
        np.savez(folder / f"{name}.npz", **arrays)
    np.save(folder / "bare.npy", x)
    (folder / "text.npz").write_text("x y")
    (folder / "empty.npz").write_bytes(b"")
    whole = (folder / "good.npz").read_bytes()
    (folder / "truncated.npz").write_bytes(whole[: len(whole) // 2])
    (folder / "read-only.json").write_text("old")
    (folder / "read-only.json").chmod(0o444)
    (folder / "read-only").mkdir()
    (folder / "read-only" / "there.json").write_text("old")
    (folder / "read-only").chmod(0o555)
    os.mkfifo(folder / "pipe")


class Opens:
    """An object whose unpickling leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Run every row in one job of three ranks; return the folder, and each rank's outcome by row."""
    folder, work = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("many")
    write_files(folder)
    rows = {}
    for name, row in ROWS.items():
        per_rank = row.argv if isinstance(row.argv, list) else [row.argv] * 3
        rows[name] = [[a.replace("@", str(folder)) for a in argv] for argv in per_rank], row.patch
    (work / "many.py").write_text(MANY)
    (work / "rows.json").write_text(json.dumps(rows))
    result = work / "result.json"
    command = [mpiexec(), "-n", "3", sys.executable, work / "many.py", work / "rows.json", folder, result]
    job = finish(start(list(map(str, command))), timeout_s=60)
    if not result.exists():
        pytest.fail(f"the job ended in row {(work / 'result.json.now').read_text()!r}:\n{job.err}")
    return folder, json.loads(result.read_text())


@pytest.mark.parametrize("name", ROWS)
def test_each_mistake_is_one_line_from_one_rank(many, name):
    row, (folder, outcomes) = ROWS[name], many
    ranks = outcomes[name]
    assert [rank["code"] for rank in ranks] == [row.code] * 3, ranks
    assert all(rank["elapsed_s"] < 5 for rank in ranks)
    assert ranks[0]["left"] == (row.code < 2 and bool({"--json", "--certificate"} & set(row.argv)))
    words = row.words.replace("@/good.npz", f"{folder}/good.npz")
    out, err = ranks[0]["out"], "".join(rank["err"] for rank in ranks)
    assert ranks[1]["out"] == ranks[2]["out"] == ""
    assert max(map(len, out.splitlines()), default=0) <= 80
    if row.code == 0:
        assert words in " ".join(out.split()) and err == ""
        return
    assert len(err.splitlines()) == 1 and err.startswith("zero_mpi: error: ") and err.endswith("\n"), err
    assert words in err
    if row.patch == "disk full":
        assert "holds  traffic" in out
        return
    assert "Checks" not in out and "Traffic" not in out
    if row.code == 2 and "weights" not in row.patch:
        assert out == ""


def test_the_table_is_long_enough():
    assert len(ROWS) >= 60


def test_nothing_was_unpickled_and_nothing_replaced(many):
    folder, _ = many
    assert not (folder / "opened").exists()
    assert stat.S_ISFIFO(os.stat(folder / "pipe").st_mode)
    assert (folder / "read-only.json").read_text() == "old"
    assert [p.read_text() for p in (folder / "read-only").iterdir()] == ["old"]


def test_the_losses_before_a_failure_are_printed(many):
    out = many[1]["a loss that becomes infinite"][0]["out"]
    table = out[out.index("Loss by step") :].splitlines()
    assert table[0] == "Loss by step, 2 steps before the failure"
    assert table[1].split() == ["step", "dp", "zero1", "zero2", "zero3"]
    for step, line in enumerate(table[2:4], 1):
        number, *losses = line.split()
        assert int(number) == step and len(set(losses)) == 1
    assert table[4:] == [""]


def test_the_json_of_a_failure_says_it_and_the_losses_before(many):
    folder, outcomes = many
    result = json.loads((folder / "failed.json").read_text())
    assert result["exit_code"] == 1 and result["failure"].startswith(
        "loss: expected a finite number, got nan"
    )
    assert list(result["losses"]) == ["dp", "zero1", "zero2", "zero3"]
    assert all(len(losses) == 2 and losses == result["losses"]["dp"] for losses in result["losses"].values())
    assert "verdicts" not in result and "memory" not in result


def test_numbers_that_are_not_finite_are_null_in_files(many):
    folder, _ = many
    floor = json.loads((folder / "floor.json").read_text())
    assert "may not fall below 1" in floor["failure"] and floor["exit_code"] == 1
    links = json.loads((folder / "vast.json").read_text())["chains"]["dp"]
    assert [link["loss"] for link in links] == [None] * 4


# Jobs of their own: what ends a job, or is the launcher's.

STEADY = """
import itertools, os, signal, sys, time
from unittest import mock
from zero_mpi import checks, cli, engine, report
from zero_mpi.model import MLP
from zero_mpi.optim import Adam
from zero_mpi.reference import Reference
from zero_mpi.transport import launched_rank

folder, what, place = sys.argv[1:4]
rank, calls = launched_rank(), itertools.count(1)
victim = 0 if place in ("the replay", "the report", "the JSON file") else 1

def note(name):
    with open(os.path.join(folder, name), "w") as file:
        file.write(f"{os.getpid()} {time.time()}")
    os.rename(os.path.join(folder, name), os.path.join(folder, name + ".done"))

def happen():
    if rank == victim:
        note("began")
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("had enough")

def breaking(owner, name, due):
    original = getattr(owner, name)
    def function(*args, **kwargs):
        if next(calls) == due:
            note(f"rank{rank}") if what == "signalled" else happen()
        return original(*args, **kwargs)
    return mock.patch.object(owner, name, function)

PLACES = {
    "set-up": (MLP, "init", 2),
    "a forward": (MLP, "forward", 9),
    "a backward": (MLP, "backward", 9),
    "an update": (Adam, "update", 5),
    "the loss": (engine, "_agreed", 5),
    "a check": (checks, "compare", 5),
    "the replay": (Reference, "step", 2),
    "the report": (report, "result_lines", 1),
    "the JSON file": (report.json, "dump", 1),
}
if place == "the start":
    happen()
with breaking(*PLACES.get(place, (MLP, "forward", 9))):
    sys.exit(cli.main(sys.argv[4:]))
"""
PHASES = ["the start", "set-up", "a forward", "a backward", "an update", "the loss", "a check"]
PHASES += ["the replay", "the report", "the JSON file"]


def library():
    """Return the MPI library's name and version, words apart by one blank."""
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split())


def open_mpi():
    return "Open MPI" in library()


def steady(tmp_path, what, place, *argv, ranks=3):
    """Start a job whose rank 1, or 0 where only that is at `place`, breaks there."""
    (tmp_path / "steady.py").write_text(STEADY)
    command = [mpiexec(), "-n", str(ranks)] if ranks > 1 else []
    command += [
        sys.executable,
        tmp_path / "steady.py",
        tmp_path,
        what,
        place,
        "--json",
        tmp_path / "out.json",
    ]
    return start([*map(str, command), *argv])


def ours(job):
    return [line for line in job.err.splitlines() if line.startswith("zero_mpi:")]


@pytest.mark.parametrize("place", PHASES)
def test_a_rank_killed_at_any_phase_ends_the_job_within_5_s(tmp_path, place):
    job = finish(steady(tmp_path, "killed", place), timeout_s=20)
    ended = time.time()
    assert job.code != 0
    assert ended - float((tmp_path / "began.done").read_text().split()[1]) < 5
    assert "holds" not in job.out
    if place == "the report":
        assert json.loads((tmp_path / "out.json").read_text())["exit_code"] == 0
    else:
        assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("place", ["a forward", "a check", "the report"])
def test_a_crash_exits_3_which_no_check_does(tmp_path, place):
    job = finish(steady(tmp_path, "raises", place), timeout_s=20)
    assert job.code == 3, job.err
    assert len(ours(job)) == 1 and "failed:" in ours(job)[0] and "had enough" in job.err, job.err


MPICH, OPEN_MPI = "MPICH Version:      5.0.2\nMPICH configure: --with-pm=hydra", "Open MPI v5.0.11, package"
UNDER_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}


def test_only_an_mpich_that_open_mpi_cannot_start_is_refused():
    refused = open_mpi_launched_mpich(MPICH, UNDER_OPEN_MPI)
    assert "Open MPI's launcher started this process, but mpi4py loads MPICH" in refused
    for library, environ in (
        (OPEN_MPI, UNDER_OPEN_MPI),
        (MPICH, {}),
        (MPICH, {"PMI_RANK": "0", "PMI_SIZE": "3"}),
        # An MPICH launcher inside an Open MPI one; srun with PMIx; an MPICH that knows PMIx.
        (MPICH, {**UNDER_OPEN_MPI, "PMI_FD": "9"}),
        (MPICH, {"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3"}),
        (MPICH + " --with-pmix=/usr", UNDER_OPEN_MPI),
    ):
        assert open_mpi_launched_mpich(library, environ) is None


CALLED_MPICH = """
import sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
mpi4py.rc.initialize = True
MPI.Get_library_version = lambda: "MPICH Version: 5.0.2"
from zero_mpi.cli import main
sys.exit(main([]))
"""


@pytest.mark.parametrize("rank", ["0", "2"])
def test_another_mpis_launcher_is_said_by_one_process_before_mpi_starts(rank):
    environ = {**UNDER_OPEN_MPI, "OMPI_COMM_WORLD_RANK": rank, "PMIX_RANK": rank}
    # Where the library is Open MPI itself, it is made to call itself MPICH.
    program = ["-c", CALLED_MPICH] if open_mpi() else MODULE
    job = finish(start([sys.executable, *program], **environ), timeout_s=20)
    assert job.code == 2 and job.out == ""
    assert len(job.err.splitlines()) == (rank == "0"), job.err
    if rank == "0":
        assert "zero_mpi: error: Open MPI's launcher started this process" in job.err


def test_help_and_version_in_a_job_are_said_once(launch):
    for option, words in (("--help", "usage:"), ("--version", "zero_mpi ")):
        job = launch(3, *MODULE, option)
        assert job.code == 0 and job.err == "" and job.out.count(words) == 1


SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("who", ["the launcher", "rank 0", "rank 2", "a single process"])
def test_a_signal_ends_the_job_with_one_line(tmp_path, who, number):
    ranks = 1 if who == "a single process" else 3
    process = steady(tmp_path, "signalled", "a forward", "--steps", "1000000", "--dims", "7,5,3", ranks=ranks)
    files = [tmp_path / f"rank{rank}.done" for rank in range(ranks)]
    deadline = time.time() + 20
    while not all(file.exists() for file in files) and time.time() < deadline:
        time.sleep(0.05)
    pid = int(files[2].read_text().split()[0]) if who == "rank 2" else int(files[0].read_text().split()[0])
    began = time.time()
    os.kill(process.pid if who == "the launcher" else pid, number)
    job = finish(process, timeout_s=20)
    assert time.time() - began < 5
    assert "Traceback" not in job.err
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["steady.py", *(f.name for f in files)])
    if open_mpi() and who == "the launcher":
        # Its launcher ends all with SIGTERM, then SIGKILL, says nothing more of ours, and exits 1.
        assert job.code != 0
        return
    # An older launcher of MPICH kills what does not end at once, and may exit with SIGKILL's number.
    killed = ranks > 1 and job.code == signal.SIGKILL and "MPICH Version: 4." in library()
    if killed and who == "the launcher":
        return
    rank = 2 if who == "rank 2" else 0
    assert killed or job.code == SIGNALS[number]
    said = ours(job) if open_mpi() else job.err.splitlines()
    assert said == [f"zero_mpi: rank {rank} was ended by {number.name}"], job.err


def piped(words, tail):
    """Run `words` with its output into `tail`; return its exit code and standard error."""
    command = " ".join(f"'{word}'" for word in words) + f" {tail}; exit ${{PIPESTATUS[0]}}"
    # Buffered, as it is for users: what is left in the buffer is tried again at the exit.
    return finish(start(["bash", "-c", command], PYTHONUNBUFFERED=""), timeout_s=30)


@pytest.mark.parametrize(
    "argv", [("--dims", "7,5,3"), ("--help",), ("bench", "--max-bytes", "64K")], ids=["run", "help", "bench"]
)
def test_a_reader_that_goes_is_no_error(tmp_path, argv):
    # The reader has gone before the first line.
    job = piped([sys.executable, *MODULE, *argv], "| true")
    assert job.code == 0 and job.err == ""
    path = tmp_path / "out.json"
    job = piped([sys.executable, *MODULE, "--dims", "7,5,3", "--json", path], "| head -n 1")
    assert job.code == 0 and job.err == "" and job.out.startswith("zero_mpi ")
    assert json.loads(path.read_text())["exit_code"] == 0


@pytest.mark.parametrize("argv", [("--help",), ("bench", "--max-bytes", "64K")], ids=["help", "bench"])
def test_what_cannot_be_printed_is_an_error(argv):
    job = piped([sys.executable, *MODULE, *argv], "> /dev/full")
    assert job.code == 2
    assert ours(job) == ["zero_mpi: error: cannot be written: standard output: No space left on device"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_full_disk_behind_standard_output_loses_no_json(tmp_path, ranks):
    path = tmp_path / "out.json"
    words = [sys.executable, *MODULE, "--dims", "7,5,3", "--json", path]
    if ranks == 1:
        job = piped(words, "> /dev/full")
    else:
        # Under a launcher rank 0 writes into a pipe of the launcher's.
        full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); import runpy, sys; "
        full += "runpy.run_module('zero_mpi', run_name='__main__', alter_sys=True)"
        words = [mpiexec(), "-n", "3", sys.executable, "-c", full, *map(str, words[3:])]
        job = finish(start(words), timeout_s=30)
    assert job.code == 2
    assert ours(job) == ["zero_mpi: error: cannot be written: standard output: No space left on device"]
    assert json.loads(path.read_text())["exit_code"] == 0
