"""Orders of summation: each reducer gives the bits of its order, and sends the bytes of its formula."""

import json

import numpy as np
import pytest
from threadworld import run_ranks

from zero_mpi import formulas, orders
from zero_mpi.comm import SharedMistake
from zero_mpi.layout import Blocks
from zero_mpi.memory import Ledger
from zero_mpi.precision import dtype_of
from zero_mpi.reducers import REDUCERS
from zero_mpi.reference import ORDERS

MODULE = ("-m", "zero_mpi")
COUNTED = [name for name in REDUCERS if name != "library"]
SIZES = range(1, 10)
# Fewer elements than ranks leave empty blocks.
LENGTHS = [0, 1, 2, 5, 8, 41, 240]
DTYPES = ["float64", "float32", "float16", "bfloat16"]


def numbers(rank, n, dtype):
    """Return numbers that differ by rank and index, of magnitudes so far apart that every order tells."""
    rng = np.random.default_rng([rank, n])
    return (rng.standard_normal(n) * 2.0 ** rng.integers(-3, 4, n)).astype(dtype_of(dtype))


def integers(rank, n, dtype):
    return ((np.arange(n) * 7 + rank * 3) % 8).astype(dtype_of(dtype))


def in_order(name, size, n, dtype):
    """Return the sum of all ranks' numbers, each block in the order that the reference knows."""

    def add(tree, part):
        if isinstance(tree, tuple):
            return add(tree[0], part) + add(tree[1], part)
        return numbers(tree, n, dtype)[part]

    blocks = Blocks(n, size)
    return np.concatenate([add(ORDERS[name](b, size), blocks.of(b)) for b in range(size)])


def reduced(comm, name, n, dtype):
    """Reduce-scatter and all-reduce; return both results, and what was counted of each."""
    reducer = REDUCERS[name](comm, Ledger())
    counts = []
    own = reducer.reduce_scatter(0, numbers(comm.rank, n, dtype)).copy()
    counts.append(comm.traffic.total(traffic="model", collective="reduce-scatter"))
    comm.traffic = type(comm.traffic)()
    whole = numbers(comm.rank, n, dtype)
    reducer.all_reduce(0, whole, lambda block: None)
    counts.append(comm.traffic.total(traffic="model"))
    comm.traffic = type(comm.traffic)()
    return own, whole, counts


def check(results, name, size, n, dtype):
    expected = in_order(name, size, n, dtype)
    assert np.concatenate([own for own, _, _ in results]).tobytes() == expected.tobytes()
    item = dtype_of(dtype).itemsize
    for rank, (_, whole, (scattered, both)) in enumerate(results):
        assert whole.tobytes() == expected.tobytes()
        sent = formulas.REDUCE_SCATTERS[name](n, size, rank)
        assert (scattered.sent_bytes, scattered.sent_messages) == (item * sum(sent), len(sent))
        gathered = formulas.all_gather_sent(n, size, rank)
        assert both.sent_bytes == item * (sum(sent) + sum(gathered))
        assert both.sent_messages == len(sent) + len(gathered)
    counts = [scattered for _, _, (scattered, _) in results]
    assert sum(c.sent_bytes for c in counts) == sum(c.received_bytes for c in counts)
    assert sum(c.sent_messages for c in counts) == sum(c.received_messages for c in counts)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("size", SIZES)
def test_bits_are_those_of_the_order_and_bytes_those_of_the_formula(size, name):
    cases = [(n, dtype) for n in LENGTHS for dtype in DTYPES]
    every = run_ranks(size, lambda comm: [reduced(comm, name, n, dtype) for n, dtype in cases])
    for i, (n, dtype) in enumerate(cases):
        check([results[i] for results in every], name, size, n, dtype)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("name", COUNTED)
def test_bits_and_bytes_are_the_same_on_mpi(ranks_of, name):
    for size in (3, 4):
        comm = ranks_of(size)
        if comm is None or comm.size != size:
            continue
        for n in LENGTHS:
            for dtype in DTYPES:
                mine = reduced(comm, name, n, dtype)
                theirs = run_ranks(size, lambda thread, n=n, dtype=dtype: reduced(thread, name, n, dtype))
                check(theirs, name, size, n, dtype)
                own, whole, counts = theirs[comm.rank]
                assert mine[0].tobytes() == own.tobytes() and mine[1].tobytes() == whole.tobytes()
                assert [c[:2] for c in mine[2]] == [c[:2] for c in counts]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_librarys_sums_are_right_and_its_calls_are_counted(ranks_of, dtype):
    for size in (3, 4):
        comm = ranks_of(size)
        if comm is None or comm.size != size:
            continue
        for n in LENGTHS:
            expected = sum(integers(r, n, dtype) for r in range(size))
            reducer = REDUCERS["library"](comm, Ledger())
            comm.traffic = type(comm.traffic)()
            own = reducer.reduce_scatter(0, integers(comm.rank, n, dtype))
            assert np.array_equal(own, expected[Blocks(n, size).of(comm.rank)])
            whole = integers(comm.rank, n, dtype)
            reducer.all_reduce(0, whole, lambda block: None)
            assert np.array_equal(whole, expected)
            assert dict(comm.traffic.calls) == {"reduce-scatter": 1, "all-reduce": 1}
            assert comm.traffic.total(traffic="model").sent_bytes == 0


def test_the_numbers_tell_orders_apart_from_three_ranks_on():
    def kinds(size):
        return {in_order(name, size, 240, "float32").tobytes() for name in COUNTED}

    # ring; reversed ring; halving; rank order, which is naive's too.
    assert [len(kinds(size)) for size in (1, 2)] == [1, 1]
    # Of three, the ring and the reversed ring add the same two first, or last: a + b = b + a.
    assert (
        in_order("ring", 3, 240, "float32").tobytes()
        == in_order("reversed-ring", 3, 240, "float32").tobytes()
    )
    assert len(kinds(3)) == 2
    assert [len(kinds(size)) for size in range(4, 10)] == [4] * 6


def leaves(tree):
    return leaves(tree[0]) + leaves(tree[1]) if isinstance(tree, tuple) else [tree]


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_adds_each_rank_once(name):
    for size in range(1, 20):
        for b in range(size):
            assert sorted(leaves(ORDERS[name](b, size))) == list(range(size))


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("n", [0, 5, 16, 100])
def test_formulas_have_closed_forms(size, n):
    totals = {
        name: sum(sum(formulas.REDUCE_SCATTERS[name](n, size, r)) for r in range(size)) for name in COUNTED
    }
    assert totals["ring"] == totals["reversed-ring"] == totals["rank-order"] == (size - 1) * n
    assert totals["naive"] == (size - 1) * size * n
    power = 2 ** (size.bit_length() - 1)
    if size == power:
        assert totals["recursive-halving"] == (size - 1) * n
    assert totals["recursive-halving"] >= (size - 1) * n
    for r in range(size):
        messages = len(formulas.halving_sent(n, size, r))
        if size == power:
            assert messages == power.bit_length() - 1
            if n % size == 0:
                assert sum(formulas.halving_sent(n, size, r)) * size == n * (size - 1)
        else:
            folded = size - power
            odd, even = (r < 2 * folded and r % 2 == i for i in (1, 0))
            assert messages == (1 if odd else power.bit_length() - 1 + even)


def test_halving_among_three_by_hand():
    # Rank 1 hands all 9 to rank 0, which swaps block 2 for blocks 0 and 1 with rank 2, and returns block 1.
    assert [formulas.halving_sent(9, 3, r) for r in range(3)] == [[3, 3], [9], [6]]


# The command.


@pytest.fixture
def threads(monkeypatch):
    """Leave out the library, which threads do not have."""
    monkeypatch.setattr(orders, "REDUCERS", {name: REDUCERS[name] for name in COUNTED})


SMALL = ("--dims", "12,30,12", "--steps", "11", "--batch", "4")


def told(size, path, capsys, *argv):
    codes = run_ranks(size, lambda comm: orders.main(comm, [*SMALL, "--json", str(path), *argv]))
    assert codes == [codes[0]] * size
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    return codes[0], out, json.loads(path.read_text())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_command_measures_what_orders_change_and_cost(threads, tmp_path, capsys, size):
    code, out, found = told(size, tmp_path / "out.json", capsys)
    assert code == found["exit_code"] == 0
    assert [entry["ranks"] for entry in found["sizes"]] == sorted({2, size})
    units = (12 * 30 + 30, 30 * 12 + 12)
    for entry in found["sizes"]:
        n, rows = entry["ranks"], {row["reducer"]: row for row in entry["rows"]}
        assert list(rows) == COUNTED
        for name, row in rows.items():
            sent = [
                sum(
                    sum(formulas.REDUCE_SCATTERS[name](u, n, r)) + sum(formulas.all_gather_sent(u, n, r))
                    for u in units
                )
                for r in range(n)
            ]
            assert row["bytes_a_rank"] == 4 * max(sent)
            assert row["schemes_identical"] is True
            assert list(row["distances"]) == ["1", "10", "11"]
            alike = n == 2 or name == "ring" or (n == 3 and name == "reversed-ring")
            assert (row["share"] == 0) == (row["max_ulp"] == 0) == (row["median_ulp"] == 0) == alike
            assert (row["distances"]["11"] == 0) == alike and row["distances"]["11"] < 1e-3
            # All round: from the sum in float64, where two terms have but one rounding.
            assert (row["exact_share"] > 0) == (n > 2)
    assert f"{size} ranks: the gradient of step 1" in out and out.count("same") >= 5


def test_schemes_that_part_under_an_order_exit_1(threads, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(orders, "_identical", lambda comm, args, scheme: scheme.reducer.name != "naive")
    code, out, found = told(3, tmp_path / "out.json", capsys)
    assert code == found["exit_code"] == 1 and out.count("PART") == 2


@pytest.mark.parametrize("steps", [1, 150])
def test_few_and_many_steps_fit_in_80_columns(threads, tmp_path, capsys, steps):
    argv = ("--steps", str(steps), "--dims", "3,2", "--batch", "1")
    code, _, found = told(2, tmp_path / "out.json", capsys, *argv)
    said = ["1"] if steps == 1 else ["1", "10", "100", "150"]
    assert code == 0 and list(found["sizes"][0]["rows"][0]["distances"]) == said


WRONG = {
    "a single rank": (1, (), "orders: expected at least 2 ranks, got 1"),
    "no steps": (2, ("--steps", "0"), "argument --steps: expected a whole number from 1"),
    "one width": (2, ("--dims", "5"), "argument --dims: expected at least two widths"),
    "an unknown option": (2, ("--reduction", "ring"), "unrecognized arguments: --reduction ring"),
    "a file in no directory": (2, ("--json", "/nowhere/o.json"), "--json /nowhere/o.json: cannot be written"),
}


@pytest.mark.parametrize("size, argv, words", WRONG.values(), ids=WRONG)
def test_mistakes_are_one_line(size, argv, words):
    with pytest.raises(SharedMistake) as caught:
        run_ranks(size, lambda comm: orders.main(comm, argv))
    assert words in str(caught.value) and "\n" not in str(caught.value)


class TestLaunched:
    pytestmark = pytest.mark.launches

    def test_all_orders_and_the_librarys_run_on_three_ranks(self, launch, tmp_path):
        path = tmp_path / "out.json"
        job = launch(3, *MODULE, "orders", *SMALL, "--json", path)
        assert job.code == 0 and job.err == "", job.out + job.err
        assert max(map(len, job.out.splitlines())) <= 80
        two, three = json.loads(path.read_text())["sizes"]
        assert (two["ranks"], three["ranks"]) == (2, 3)
        assert all(row["share"] == 0 for row in two["rows"])
        rows = {row["reducer"]: row for row in three["rows"]}
        assert list(rows) == list(REDUCERS)
        assert rows["rank-order"]["share"] > 0 == rows["reversed-ring"]["share"]
        assert rows["library"]["bytes_a_rank"] is rows["library"]["schemes_identical"] is None
