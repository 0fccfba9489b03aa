"""Mistakes on purpose: each is seen under every scheme it applies to, and named; an escape is told."""

import json
import re
import sys

import pytest
from conftest import finish, mpiexec, start
from helpers import run_with
from threadworld import run_ranks

from zero_mpi import faults
from zero_mpi.comm import SharedMistake
from zero_mpi.data import SeedStream
from zero_mpi.injection import FAULTS, Fault, check_makes_a_difference, fault
from zero_mpi.model import MLP
from zero_mpi.parting import CLASSES
from zero_mpi.precision import Precision
from zero_mpi.run import run
from zero_mpi.schemes import DP, SCHEMES, ZeRO1, ZeRO3
from zero_mpi.training import LossScale, Training

MODULE = ("-m", "zero_mpi")
UNITS = len(faults.DIMS) - 1

# Python's allocator serves all threads: the audit is for ranks that are processes.
IN_THREADS = [
    (name, S) for name, f in FAULTS.items() for S in SCHEMES if S.key in f.schemes and f.check != "audit"
]


def made(name, S, size):
    outcomes = run_ranks(size, lambda comm: faults.make(comm, FAULTS[name], S))
    assert outcomes == [outcomes[0]] * size
    return outcomes[0]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name, S", IN_THREADS, ids=lambda value: getattr(value, "key", value))
def test_each_fault_is_seen_by_its_check_and_named(name, S, size):
    outcome, wanted = made(name, S, size), FAULTS[name]
    assert outcome.caught, outcome
    assert (outcome.fault, outcome.scheme, outcome.cause) == (name, S.name, wanted.cause)
    assert wanted.check in outcome.checks or (wanted.check, outcome.checks[0]) == ("learning", "reference")
    late = name in ("stale-gradient", "skip-all-gather", "one-step-behind", "nan")
    if wanted.check in ("learning", "reference", "non-finite"):
        assert outcome.step == (3 if late else 1)
        assert outcome.unit == (1 if name in ("drop-reduction", "nan") else 0)


@pytest.mark.parametrize("S", SCHEMES)
def test_a_run_without_a_fault_passes_every_check(S):
    nothing = Fault("nothing", "", tuple(C.key for C in SCHEMES), "learning", "", {})
    outcome = run_ranks(3, lambda comm: faults.make(comm, nothing, S))[0]
    assert not outcome.caught and outcome.checks == []


def test_what_is_not_injected_is_not_touched():
    # The methods of a scheme without a fault are its class's own.
    def work(comm):
        wanted = faults.settings_of(FAULTS["rotated-ring"], "zero1")
        clean, broken = wanted.build(DP, comm), wanted.build(ZeRO1, comm)
        for owner in (clean, clean.reducer, clean.comm, clean.model):
            replaced = [name for name in vars(owner) if callable(getattr(type(owner), name, None))]
            assert replaced == []
        assert "reduce_scatter" in vars(broken.reducer)

    run_ranks(3, work)


def test_every_class_a_fault_names_is_one():
    assert {f.cause for f in FAULTS.values()} <= {*CLASSES, "", "different initial weights"}
    told = {f.cause for f in FAULTS.values()}
    # Of micro-batches added at another time no single scheme's mistake is made here; tests of parting do.
    assert set(CLASSES) - told == {"order of accumulation", "unknown"}


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_a_fault_is_named_in_16_bits_too(precision):
    def work(comm):
        wanted = faults.settings_of(FAULTS["only-last-rank"], "zero3", precision=Precision.named(precision))
        return run(comm, wanted, [DP, ZeRO3])["learning"]["schemes"]["zero3"]["parting"]["cause"]

    assert run_ranks(3, work) == ["missing contribution"] * 3


# The command, over threads: who calls it and what it prints.


def told(size, *argv, capsys=None):
    codes = run_ranks(size, lambda comm: faults.main(comm, argv))
    assert codes == [codes[0]] * size
    return codes[0], capsys.readouterr().out


def test_only_those_named_are_made_and_all_fit_in_80_columns(capsys):
    code, out = told(3, "--only", "divide-twice,never-free,nan", capsys=capsys)
    assert code == 0
    rows = [line.split() for line in out.splitlines()[2:6]]
    assert [row[0] for row in rows] == ["divide-twice", "divide-twice", "never-free", "nan"]
    assert rows[0] == ["divide-twice", "D", "R", "1", "0", "divisor", "or", "scale"]
    assert rows[2] == ["never-free", "3", "M", "1", "-", "-"]
    assert out.splitlines()[-1] == "  9 of 9 caught, and their cause named"
    assert "ESCAPED" not in out and max(map(len, out.splitlines())) <= 80


def test_json_has_every_outcome(capsys, tmp_path):
    path = tmp_path / "out.json"
    code, _ = told(3, "--only", "send-twice,rotated-ring", "--json", str(path), capsys=capsys)
    found = json.loads(path.read_text())
    assert code == found["exit_code"] == 0
    assert (found["schema"], found["ranks"], found["not_made"]) == ("zero_mpi.faults/1", 3, [])
    assert [row["fault"] for row in found["faults"]] == ["send-twice"] * 4 + ["rotated-ring"] * 4
    assert {row["cause"] for row in found["faults"][4:]} == {"summation order"}
    assert found["faults"][1]["says"].startswith("ZeRO-1, rank 0: step 1: reduce-scatter: sent ")


@pytest.mark.parametrize("size", [2, 3])
def test_a_fault_that_is_none_on_two_ranks_is_said_not_to_be_made(size, capsys):
    found, out = told(size, "--only", "rotated-ring,send-twice", capsys=capsys)
    assert found == 0
    assert ("rotated-ring: not made, it is no mistake below 3 ranks" in out) == (size == 2)
    assert out.splitlines()[-1].strip().startswith("4 of 4" if size == 2 else "8 of 8")


def test_faults_of_which_none_is_one_on_so_few_ranks_are_refused():
    with pytest.raises(SharedMistake, match="^--only: expected at least 3 ranks for rotated-ring, got 2$"):
        run_ranks(2, lambda comm: faults.main(comm, ["--only", "rotated-ring"]))


def harmless(scheme):
    """Nothing at all."""


ESCAPES = {
    "one that does nothing": {"scheme": harmless},
    "one of another class": {"cause": "stale"},
    "one that another check must see": {"check": "memory"},
    "one with a class that has none": {"cause": ""},
}


@pytest.mark.parametrize("change", ESCAPES.values(), ids=ESCAPES)
def test_a_fault_that_escapes_or_is_named_wrong_exits_1(change, monkeypatch, capsys, tmp_path):
    broken = FAULTS["count-a-rank-twice"]._replace(**change)
    monkeypatch.setitem(FAULTS, "count-a-rank-twice", broken)
    path = tmp_path / "out.json"
    argv = ("--only", "count-a-rank-twice,nan", "--json", str(path))
    code, out = told(3, *argv, capsys=capsys)
    assert code == 1 == json.loads(path.read_text())["exit_code"]
    assert out.splitlines()[-1] == "  4 of 8 caught, and their cause named"
    marked = [line for line in out.splitlines() if line.startswith("! ")]
    assert sum("ESCAPED  count-a-rank-twice under" in line for line in marked) == 4
    assert {line.split()[1] for line in marked} == {"count-a-rank-twice", "ESCAPED"}
    assert max(map(len, out.splitlines())) <= 80


def test_a_fault_is_one_function_and_a_line(monkeypatch, capsys):
    monkeypatch.setattr("zero_mpi.injection.FAULTS", dict(FAULTS))
    from zero_mpi import injection

    @fault("lose-a-bias", "learning", "unknown", schemes=("zero1",))
    def lose_a_bias(scheme):
        """The last bias of each unit is never updated."""
        update = scheme.update

        def forgetful(scale):
            update(scale)
            scheme.params[0][-1] = 1

        scheme.update = forgetful

    assert injection.FAULTS["lose-a-bias"].what == "The last bias of each unit is never updated"
    monkeypatch.setattr(faults, "FAULTS", injection.FAULTS)
    code, out = told(3, "--only", "lose-a-bias", capsys=capsys)
    assert code == 0 and re.search(r"lose-a-bias +1 +L +1 +0 +unknown", out)


def test_the_list_says_what_each_is_and_makes_none(capsys):
    code, out = told(1, "--list", capsys=capsys)
    assert code == 0 and all(f"  {name} " in out for name in FAULTS)
    assert max(map(len, out.splitlines())) <= 80 and "\n  nan " in out


WRONG = {
    "an unknown name": (3, ("--only", "divide-thrice"), "--only: expected faults out of drop-reduction, "),
    "an empty name": (3, ("--only", ""), "got ''"),
    "an unknown option": (3, ("--except", "nan"), "unrecognized arguments: --except nan"),
    "a single rank": (1, (), "faults: expected at least 2 ranks, got 1"),
    "a file in no directory": (3, ("--json", "/nowhere/out.json"), "--json /nowhere/out.json: cannot be"),
}


@pytest.mark.parametrize("size, argv, words", WRONG.values(), ids=WRONG)
def test_mistakes_are_one_line(size, argv, words):
    with pytest.raises(SharedMistake) as caught:
        run_ranks(size, lambda comm: faults.main(comm, argv))
    assert words in str(caught.value) and "\n" not in str(caught.value)


# --inject: one fault in a run of one's own.

REFUSED = {
    "too few ranks": ("rotated-ring", ["dp"], 2, {}, "expected at least 3 ranks, got 2"),
    "one rank": ("nan", ["dp"], 1, {}, "expected at least 2 ranks, got 1"),
    "another scheme": ("never-free", ["dp", "zero1"], 3, {}, "expected --scheme zero3, got dp, zero1"),
    "too few steps": ("one-step-behind", ["dp"], 3, {"steps": 2}, "expected at least 3 steps, got 2"),
    "too few units": ("unit-order", ["dp"], 3, {"units": 1}, "expected at least 2 units, got 1"),
    "no accumulation": ("sum-micro-batches", ["dp"], 3, {}, "expected --accumulate 2 beside it"),
    "no clipping": ("local-norm", ["dp"], 3, {}, "expected --clip-norm 0.01 beside it"),
    "no audit": ("hidden-copy", ["dp"], 3, {}, "expected --audit-memory beside it"),
}


@pytest.mark.parametrize("name, schemes, size, options, words", REFUSED.values(), ids=REFUSED)
def test_a_fault_that_would_do_nothing_is_refused(name, schemes, size, options, words):
    defaults = {"steps": 3, "units": 2, "accumulate": 1, "clip_norm": None, "audit_memory": False}
    with pytest.raises(ValueError, match=f"^--inject {name}: {words}$"):
        check_makes_a_difference(FAULTS[name], schemes, size, **{**defaults, **options})


def test_each_fault_runs_with_what_it_needs():
    options = {"steps": 3, "units": 2, "accumulate": 2, "clip_norm": 1.0, "audit_memory": True}
    for f in FAULTS.values():
        check_makes_a_difference(f, f.schemes[-1:], 3, **options)


class TestLaunched:
    pytestmark = pytest.mark.launches

    def test_every_fault_is_caught_on_two_ranks(self, launch, tmp_path):
        path = tmp_path / "out.json"
        job = launch(2, *MODULE, "faults", "--json", path)
        assert job.code == 0, job.out + job.err
        assert job.err == "" and "ESCAPED" not in job.out
        assert max(map(len, job.out.splitlines())) <= 80
        found = json.loads(path.read_text())
        assert found["not_made"] == ["rotated-ring"]
        assert len(found["faults"]) == sum(len(f.schemes) for f in FAULTS.values()) - 4
        assert all(row["caught"] for row in found["faults"])

    def test_five_ranks_see_what_depends_on_their_number(self, launch):
        names = "drop-reduction,only-last-micro-batch,rotated-ring,off-by-one,neighbours-gradient,unit-order"
        job = launch(5, *MODULE, "faults", "--only", names)
        assert job.code == 0 and job.err == "", job.out + job.err
        assert job.out.splitlines()[-1] == "  23 of 23 caught, and their cause named"

    def test_an_injected_fault_fails_a_run_and_is_explained(self, launch, tmp_path):
        path = tmp_path / "out.json"
        job = launch(
            3,
            *MODULE,
            "--inject",
            "count-a-rank-twice",
            "--scheme",
            "zero2",
            "--precision",
            "fp32",
            "--json",
            path,
        )
        # A launcher may have words of its own for a job that ends with 1.
        assert job.code == 1 and not job.complaints and "Traceback" not in job.err
        assert max(map(len, job.out.splitlines())) <= 80
        assert "class     doubled contribution" in job.out and "rank 1 twice" in job.out
        found = json.loads(path.read_text())
        assert found["settings"]["inject"] == "count-a-rank-twice"
        assert found["learning"]["schemes"]["zero2"]["parting"]["cause"] == "doubled contribution"

    @pytest.mark.parametrize(
        "argv, words",
        [
            (("--inject", "gremlins"), "argument --inject: invalid choice: 'gremlins'"),
            (("--inject", "never-free", "--scheme", "zero1"), "--inject never-free: expected --scheme zero3"),
        ],
    )
    def test_a_mistake_in_asking_for_one_is_one_line(self, argv, words):
        job = finish(start([mpiexec(), "-n", "3", sys.executable, *MODULE, *argv]))
        assert job.code == 2 and job.out == ""
        assert len(job.complaints) == 1 and words in job.complaints[0]


@pytest.mark.parametrize("name, cause", [("stale-gradient", "stale"), ("local-norm", "divisor or scale")])
def test_a_fault_under_a_loss_scale_is_named_too(name, cause):
    # The first steps overflow, and are skipped.
    options = {"clip_norm": 0.01, "loss_scale": LossScale(2.0**17)}
    result = run_with(
        [DP, ZeRO3],
        model=MLP((12, 30, 12)),
        data=SeedStream(7, 4, 12, 12),
        steps=9,
        training=Training(**options),
        fault=FAULTS[name],
        faulty=("zero3",),
    )
    found = result["learning"]["schemes"]["zero3"]
    assert 0 < len(found["skipped_steps"]) < 4
    assert found["parting"]["cause"] == cause, found["parting"]
