"""Certificates: the same digests however blocks are cut; what two have in common; what is none."""

import json
import os
import re
import sys

import numpy as np
import pytest
from conftest import finish, start
from helpers import settings
from threadworld import run_ranks

from zero_mpi import certificate, checks, compare
from zero_mpi.certificate import Chain, add
from zero_mpi.comm import SharedMistake
from zero_mpi.data import FileRows, SeedStream
from zero_mpi.digest import digest, rows_digest
from zero_mpi.layout import Blocks
from zero_mpi.model import MLP
from zero_mpi.optim import Adam
from zero_mpi.run import run
from zero_mpi.schemes import DP, SCHEMES
from zero_mpi.training import Training

MODULE = ("-m", "zero_mpi")
RNG = np.random.default_rng(3)


def numbers(n, dtype=np.float32):
    return np.random.default_rng(n).standard_normal(n).astype(dtype)


# Chains.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 50])
def test_digests_of_blocks_add_up_to_that_of_the_whole(size, dtype):
    units = [41, 9000, 3]
    wholes = [numbers(n, dtype) for n in units]
    whole, parts = Chain(units), Chain(units)
    whole.append(0, params=wholes)
    digests = []
    for u, x in enumerate(wholes):
        blocks = Blocks(x.size, size)
        digests.append(add(digest(x[blocks.of(r)], blocks.start(r), u) for r in range(size)))
    parts.append(0, params=digests)
    assert whole.links == parts.links
    assert all(re.fullmatch("[0-9a-f]{16}", text) for text in whole.links[0].params)


def test_a_chain_takes_arrays_of_any_shape_and_views():
    x = numbers(24)
    flat, shaped, views = Chain([24]), Chain([24]), Chain([24])
    flat.append(3, params=[x], grads=[x])
    shaped.append(np.int64(3), params=[x.reshape(2, 12)], grads=[x.reshape(4, 6)])
    views.append(3, params=[np.repeat(x, 2)[::2]], grads=[np.uint64(digest(x))])
    assert flat.links == shaped.links == views.links


def test_equal_units_in_another_order_are_another_chain():
    x, y = numbers(10), numbers(10) + 1
    links = []
    for params in ([x, y], [y, x]):
        chain = Chain([10, 10])
        chain.append(0, params=params)
        links.append(chain.links[0].params)
    assert not set(links[0]) & set(links[1])


WRONG_LINKS = {
    "a step that does not rise": (ValueError, 2, {"params": [1]}, "step: expected more than 2, got 2"),
    "another number of units": (ValueError, 3, {"params": [1, 2]}, "params: expected 1 units, got 2"),
    "no gradients": (ValueError, 3, {"params": [1], "grads": []}, "grads: expected 1 units, got 0"),
    "a unit of another size": (
        ValueError,
        3,
        {"params": [np.ones(5, np.float32)]},
        "params of unit 0: expected 4 elements, got 5",
    ),
    "a list": (TypeError, 3, {"params": [[1, 2, 3, 4]]}, "params of unit 0: expected a numpy array or a dig"),
    "complex numbers": (
        TypeError,
        3,
        {"params": [np.ones(4, np.complex128)]},
        "array: expected elements of 1, 2, 4 or 8 bytes",
    ),
    "half a step": (ValueError, 3.5, {"params": [np.ones(4, np.float32)]}, "step: expected a whole number"),
    "objects": (
        TypeError,
        3,
        {"params": [np.array([{}] * 4)]},
        "array: expected elements of 1, 2, 4 or 8 bytes",
    ),
}


@pytest.mark.parametrize("error, step, link, words", WRONG_LINKS.values(), ids=WRONG_LINKS)
def test_links_that_fit_no_chain_are_refused_and_leave_it_as_it_was(error, step, link, words):
    chain = Chain([4])
    chain.append(2, params=[numbers(4)])
    with pytest.raises(error, match=f"^{re.escape(words)}"):
        chain.append(step, **link)
    assert [link.step for link in chain.links] == [2]


def test_what_is_written_is_read_again(tmp_path):
    chain = Chain([4])
    chain.append(0, params=[numbers(4)])
    chain.append(1, params=[numbers(4) * 2], grads=[numbers(4)], loss=np.float32(0.5), data=7)
    certificate.write(tmp_path / "c.json", {"mine": chain}, {"model": "my MLP", "ranks": 1})
    found = certificate.read(tmp_path / "c.json")
    assert found["chains"] == {"mine": chain.links}
    assert found["settings"] == {"model": "my MLP", "ranks": 1, "unit_numels": [4]}
    with pytest.raises(ValueError, match="^chains: expected at least one, got none$"):
        certificate.document({}, {})


# Chains of runs.


def certified(size, schemes=SCHEMES, every=1, **options):
    """Return the chains of a run over threads."""
    wanted = settings(certificate_every=every, **options)
    results = run_ranks(size, lambda comm: run(comm, wanted, list(schemes))["certificate"])
    assert all(chains == results[0] for chains in results)
    return results[0]


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_the_four_schemes_keep_one_chain(size, precision):
    chains = certified(size, precision=precision)
    assert list(chains) == ["dp", "zero1", "zero2", "zero3"]
    first = chains["dp"].links
    assert [link.step for link in first] == list(range(6))
    assert all(chain.links == first for chain in chains.values())
    assert first[0].grads is first[0].data is first[0].loss is None
    # Every step has digests of its own.
    assert len({tuple(link.params) for link in first}) == len({link.data for link in first}) == 6
    assert len({tuple(link.grads) for link in first[1:]}) == 5


def test_a_chain_is_that_of_the_whole_weights_and_gradients():
    def work(comm):
        wanted = settings(certificate_every=1)
        scheme = wanted.build(DP, comm)
        for batches in wanted.global_batches(comm):
            scheme.step(*batches[comm.rank])
        theta = scheme.full_theta()
        # Every rank has the whole gradient, of which its block counts.
        return theta, scheme.grads, checks.unit_digests(scheme)

    theta, gradients, (grads, params) = run_ranks(3, work)[0]
    units = np.split(theta, [40])
    assert params == [digest(unit, 0, u) for u, unit in enumerate(units)]
    assert grads == [digest(unit, 0, u) for u, unit in enumerate(gradients)]
    assert certified(3)["dp"].links[-1].params == [f"{value:016x}" for value in params]


@pytest.mark.parametrize(
    "every, steps", [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (5, [0, 5]), (9, [0, 5])]
)
def test_digests_are_taken_at_the_start_every_so_many_steps_and_at_the_end(every, steps):
    assert [link.step for link in certified(2, [DP], every)["dp"].links] == steps


def test_what_no_number_of_ranks_changes_is_the_same_for_each():
    x, y = numbers(24 * 7).reshape(24, 7), numbers(24 * 3).reshape(24, 3)
    chains = {}
    for size in (1, 2, 3, 4):
        data = FileRows(x, y, seed=1, rows=12 // size, epochs=2)
        chains[size] = certified(size, [DP], data=data, precision="fp32")["dp"].links
    for size in (2, 3, 4):
        assert [link.data for link in chains[size]] == [link.data for link in chains[1]]
        assert chains[size][0] == chains[1][0]
        assert chains[size][1].grads != chains[1][1].grads


def test_frozen_units_and_micro_batches_are_certified_too():
    chains = certified(3, training=Training(2, "step", freeze=(0,)), data=SeedStream(7, 4, 7, 3, 2))
    assert all(chain.links == chains["dp"].links for chain in chains.values())
    assert len({link.params[0] for link in chains["dp"].links}) == 1
    assert len({link.params[1] for link in chains["dp"].links}) == 6


@pytest.mark.mpi(min_size=3)
def test_certificates_of_threads_and_of_mpi_are_the_same(ranks_of):
    for size in (3, 4):
        comm = ranks_of(size)
        if comm is not None and comm.size == size:
            chains = run(comm, settings(certificate_every=2), list(SCHEMES))["certificate"]
            assert chains == certified(size, every=2)


def test_a_plain_loop_in_numpy_has_the_certificate_of_data_parallel(tmp_path):
    """What the module's documentation shows, beside a run of ours on one rank."""
    model, adam = MLP((7, 5, 3)), Adam()
    weights = [w.copy() for w in model.init(0)]
    state = [{slot: np.zeros_like(w) for slot in adam.slots} for w in weights]
    chain = Chain(units=[w.size for w in weights])
    chain.append(0, params=weights)
    batches = SeedStream(7, 4, 7, 3).global_batches(1)
    for step in range(1, 6):
        ((x, y),) = next(batches)[0]
        rows = rows_digest(x, y)
        saved, grads = [], [np.empty_like(w) for w in weights]
        for u, w in enumerate(weights):
            x, kept = model.forward(u, w, x)
            saved.append(kept)
        loss, dy = model.loss(x, y)
        for u in (1, 0):
            dy = model.backward(u, weights[u], saved[u], dy, grads[u])
        for w, g, s in zip(weights, grads, state, strict=True):
            adam.update(w, g, s, step)
        chain.append(step, params=weights, grads=grads, loss=loss, data=rows)
    said = {"model": model.describe(), "grads_dtype": "float32"}
    certificate.write(tmp_path / "mine.json", {"mine": chain}, said)
    certificate.write(tmp_path / "ours.json", certified(1, precision="fp32"), said)
    pairs = certificate.compare(*(certificate.read(tmp_path / name) for name in ("mine.json", "ours.json")))
    assert [(c.first, c.second, c.same_steps, c.steps) for c in pairs] == [("mine", "dp", 6, 6)]
    assert pairs[0].cause == ""
    assert pairs[0].not_compared == ["zero1, zero2, zero3: chains that only one of them has"]
    assert [link.loss for link in chain.links[1:]] == [
        link.loss for link in certificate.read(tmp_path / "ours.json")["chains"]["dp"][1:]
    ]


# Comparing.


def made(steps=(0, 1, 2, 3), changed=None, drop=(), **said):
    """Return a certificate of two units; changed : (step, field, unit) whose digest is another."""
    chain = Chain([4, 5])
    for step in steps:
        what = {
            "params": [100 + step, 200 + step],
            "grads": [300 + step, 400 + step] if step else None,
            "data": 500 + step if step else None,
        }
        for at, name, unit in changed or ():
            if at == step and unit is None:
                what[name] += 1000
            elif at == step:
                what[name][unit] += 1000
        for name in drop:
            what[name] = None
        chain.append(step, **what)
    document = certificate.document({"dp": chain}, {"model": "a model", "grads_dtype": "float32", **said})
    return json.loads(json.dumps(document))


def compared(tmp_path, *documents):
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(json.dumps(document))
    (found,) = certificate.compare(*map(certificate.read, paths))
    return found


PARTING = {
    "the same": (None, None, "", None, ""),
    "data": ([(2, "data", None)], 2, "data", None, "different data"),
    "data and what follows": ([(2, "data", None), (2, "grads", 0)], 2, "data", None, "different data"),
    "initial weights": (
        [(0, "params", 1), (1, "grads", 0)],
        0,
        "initial weights",
        1,
        "different initial weights",
    ),
    "gradient": ([(3, "grads", 1), (3, "params", 0)], 3, "gradient", 1, "unknown"),
    "parameters": ([(3, "params", 0)], 3, "parameters", 0, "unknown"),
    "an earlier step": ([(1, "params", 1), (2, "data", None)], 1, "parameters", 1, "unknown"),
}


@pytest.mark.parametrize("changed, step, phase, unit, cause", PARTING.values(), ids=PARTING)
def test_the_first_link_that_parts_says_in_what(tmp_path, changed, step, phase, unit, cause):
    found = compared(tmp_path, made(), made(changed=changed))
    assert (found.step, found.phase, found.unit, found.cause) == (step, phase, unit, cause)
    parted = len({at for at, _, _ in changed or ()})
    assert (found.same_steps, found.steps) == (4 - parted, 4)
    assert found.not_compared == []


def test_what_cannot_be_compared_is_said_and_the_rest_is_compared(tmp_path):
    # Gradients of another dtype have other bits, and say nothing.
    other = made(changed=[(1, "grads", 0)], grads_dtype="float16")
    found = compared(tmp_path, made(), other)
    assert found.cause == "" and found.not_compared == ["gradients, stored as float32 and float16"]
    found = compared(tmp_path, made(), made(drop=["grads", "data"]))
    assert found.cause == ""
    assert found.not_compared == [
        f"{name} of 3 steps, of which one of them has no digest" for name in ("data", "gradients")
    ]
    found = compared(tmp_path, made(), made(steps=(0, 3)))
    assert (found.same_steps, found.steps, found.not_compared) == (
        2,
        2,
        ["2 steps that only one of them has"],
    )
    found = compared(tmp_path, made(), made(steps=(0, 3), changed=[(3, "params", 1)]))
    assert (found.step, found.phase, found.unit) == (3, "parameters", 1)


def test_chains_of_one_name_are_compared_and_else_the_first_of_each():
    chains = {name: Chain([4]) for name in ("dp", "zero1", "zero3")}
    for chain in chains.values():
        chain.append(0, params=[1])

    def of(*names):
        document = certificate.document({name: chains[name] for name in names}, {})
        return {**document, "chains": {name: chains[name].links for name in names}}

    pairs = certificate.compare(of("dp", "zero1"), of("zero3", "zero1", "dp"))
    assert [(c.first, c.second) for c in pairs] == [("dp", "dp"), ("zero1", "zero1")]
    assert [(c.first, c.second) for c in certificate.compare(of("dp"), of("zero3", "zero1"))] == [
        ("dp", "zero3")
    ]


# The command.


def command(tmp_path, capsys, a, b):
    paths = []
    for name, given in (("a.json", a), ("b.json", b)):
        paths.append(str(tmp_path / name))
        if isinstance(given, dict):
            (tmp_path / name).write_text(json.dumps(given))
        elif given is not None:
            paths[-1] = str(given)
    codes = run_ranks(3, lambda comm: compare.main(comm, paths))
    out = capsys.readouterr().out
    assert codes == [codes[0]] * 3 and max(map(len, out.splitlines())) <= 80
    return codes[0], " ".join(out.split())


def test_the_same_bits_exit_0_and_others_1(tmp_path, capsys):
    code, out = command(tmp_path, capsys, made(), made())
    assert code == 0 and "4 of 4 nowhere -" in out and "The same bits wherever" in out
    assert "Settings that differ" not in out
    code, out = command(tmp_path, capsys, made(), made(changed=[(2, "grads", 1)]))
    assert code == 1 and "3 of 4 step 2, gradient, unit 1 unknown" in out
    assert "Nothing in the settings explains it" in out


def test_settings_that_may_explain_it_are_said(tmp_path, capsys):
    other = made(changed=[(2, "grads", 1)], ranks=4, blas="x" * 60, reduction="rank-order", host="b")
    code, out = command(tmp_path, capsys, made(ranks=3, blas="y", reduction="ring", host="a"), other)
    assert code == 1 and "ranks 3 4" in out and "xxx..." in out
    assert "another number of ranks cuts and sums differently; another" in out
    code, out = command(tmp_path, capsys, made(ranks=3, grads_dtype="float16"), made(ranks=4))
    assert code == 0 and "not compared: gradients, stored as float16 and float32" in out


@pytest.mark.parametrize("name", PARTING)
def test_each_outcome_fits_in_80_columns(tmp_path, capsys, name):
    changed = PARTING[name][0]
    code, out = command(tmp_path, capsys, made(), made(changed=changed))
    assert code == (changed is not None) and (PARTING[name][4] or "nowhere") in out


def test_settings_and_paths_of_any_length_fit_in_80_columns(tmp_path, capsys):
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    code, _ = command(folder, capsys, made(**{"setting " * 12: 1}), made(**{"a" * 90: "b" * 90}))
    assert code == 0


@pytest.fixture
def files(tmp_path):
    """Return a folder of what is no certificate, or not one to compare."""
    good = made()
    text = json.dumps(good)
    (tmp_path / "good.json").write_text(text)
    for name, change in {
        "other model": {"settings": {**good["settings"], "model": "another"}},
        "other sizes": {"settings": {**good["settings"], "unit_numels": [4, 6]}},
        "other schema": {"schema": "zero_mpi.run/2"},
        "no chain": {"chains": {}},
        "chains in a list": {"chains": [1]},
        "no settings": {"settings": None},
        "a chain of words": {"chains": {"dp": "words"}},
        "a link too many fields": {"chains": {"dp": [{**good["chains"]["dp"][0], "more": 1}]}},
        "a step in words": {"chains": {"dp": [{**good["chains"]["dp"][0], "step": "1"}]}},
        "a unit missing": {"chains": {"dp": [{**good["chains"]["dp"][0], "params": ["0" * 16]}]}},
        "a gradient missing": {"chains": {"dp": [{**good["chains"]["dp"][1], "grads": ["0" * 16]}]}},
        "a digest in numbers": {"chains": {"dp": [{**good["chains"]["dp"][0], "params": [1, 2]}]}},
        "steps twice": {"chains": {"dp": [good["chains"]["dp"][1]] * 2}},
        "an empty chain": {"chains": {"dp": []}},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**good, **change}))
    (tmp_path / "more steps.json").write_text(json.dumps(made(steps=range(6))))
    (tmp_path / "truncated.json").write_text(text[: len(text) // 2])
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "a list.json").write_text("[]")
    (tmp_path / "a number.json").write_text("1")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    return tmp_path


ERRORS = {
    "other model": "model: expected the same in both certificates, got a model and another",
    "other sizes": "unit_numels: expected the same in both certificates, got [4, 5] and [4, 6]",
    "more steps": "steps: expected the same in both certificates, got 3 and 5",
    "other schema": "expected a certificate, zero_mpi.certificate/2, got JSON with the schema zero_mpi.run/2",
    "no chain": "got one that lacks something",
    "chains in a list": "got one that lacks something",
    "no settings": "got one that lacks something",
    "a chain of words": "got one that lacks something",
    "a link too many fields": "got one that lacks something",
    "a step in words": "got one that lacks something, in chain dp",
    "a unit missing": "got one that lacks something, in chain dp",
    "a gradient missing": "got one that lacks something, in chain dp",
    "a digest in numbers": "got one that lacks something, in chain dp",
    "steps twice": "got one that lacks something, in chain dp",
    "an empty chain": "steps: expected the same in both certificates, got 3 and 0",
    "truncated": "got a file that is damaged or no JSON",
    "empty": "got a file that is damaged or no JSON",
    "a list": "got JSON that is none",
    "a number": "got JSON that is none",
    "deep": "got a file that is damaged or no JSON",
    "binary": "got a file that is no text",
    "folder": "cannot be read: Is a directory",
    "pipe": "got no regular file",
    "nowhere": "cannot be read: No such file or directory",
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_what_cannot_be_compared_is_one_line(files, name, second, capsys):
    paths = [str(files / "good.json"), str(files / f"{name}.json")]
    if not second:
        paths.reverse()
    with pytest.raises(SharedMistake) as caught:
        run_ranks(2, lambda comm: compare.main(comm, paths))
    words = str(caught.value)
    if not second:
        ones = re.search("got (.*) and (.*)$", ERRORS[name])
        expected = ERRORS[name][: ones.start()] + f"got {ones[2]} and {ones[1]}" if ones else ERRORS[name]
    else:
        expected = ERRORS[name]
    assert words.endswith(expected) and "\n" not in words
    assert words.startswith(str(files)) or " in both certificates, " in words
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("argv", [[], ["a.json"], ["a.json", "b.json", "c.json"], ["--what", "a", "b"]])
def test_other_than_two_files_are_refused(argv):
    with pytest.raises(SharedMistake):
        run_ranks(2, lambda comm: compare.main(comm, argv))


class TestLaunched:
    pytestmark = pytest.mark.launches

    def test_files_of_two_runs_are_compared_without_mpiexec(self, launch, tmp_path):
        def write(name, ranks, *argv):
            path = tmp_path / name
            job = launch(ranks, *MODULE, "--dims", "7,5,3", "--steps", "4", "--certificate", path, *argv)
            assert job.code == 0, job.err
            return path

        def compare_files(*paths):
            job = finish(start([sys.executable, *MODULE, "compare", *map(str, paths)]))
            assert max(map(len, job.out.splitlines()), default=0) <= 80
            return job

        a = write("a.json", 3, "--scheme", "all")
        b = write("b.json", 3, "--scheme", "zero3", "--certificate-every", "3", "--no-check")
        job = compare_files(a, b)
        assert job.code == 0 and job.err == "", job.out + job.err
        text = " ".join(job.out.split())
        assert "zero3 zero3 3 of 3 nowhere" in text and "2 steps that only one of them has" in text
        found = certificate.read(a)
        assert list(found["chains"]) == ["dp", "zero1", "zero2", "zero3"]
        assert {"zero_mpi", "mpi", "numpy", "blas", "ranks", "model", "reduction"} <= set(found["settings"])
        # The random stream deals other rows to another number of ranks.
        job = compare_files(a, write("c.json", 2))
        assert job.code == 1 and "0 of 5" not in job.out
        assert "zero3 zero3 1 of 5 step 1 different data" in " ".join(job.out.split())
        job = compare_files(a, tmp_path / "none.json")
        assert job.code == 2 and job.out == "" and len(job.complaints) == 1
        job = compare_files(a, write("d.json", 2, "--init-seed", "1"))
        assert "0 of 5 step 0, unit 0 different initial weights" in " ".join(job.out.split())

    @pytest.mark.parametrize(
        "argv, words",
        [
            (["--certificate-every", "2"], "--certificate-every: expected --certificate FILE beside it"),
            (
                ["--certificate", "@", "--sweep", "1"],
                "--certificate: expected one number of ranks, got --sweep",
            ),
            (["--certificate", "/"], "--certificate"),
        ],
    )
    def test_mistakes_in_asking_for_one_are_one_line(self, tmp_path, argv, words):
        argv = [str(tmp_path / "c.json") if a == "@" else a for a in argv]
        job = finish(start([sys.executable, *MODULE, *argv]))
        assert job.code == 2 and len(job.complaints) == 1 and words in job.complaints[0]
        assert list(tmp_path.iterdir()) == []


def test_labels_of_other_rows_are_other_data():
    x, y = numbers(40).reshape(8, 5), numbers(16).reshape(8, 2)
    order = np.random.default_rng(1).permutation(8)
    assert rows_digest(x, y) == rows_digest(x[order], y[order])
    swapped = x.copy()
    swapped[[0, 1], 0] = swapped[[1, 0], 0]
    others = [(x, y[::-1]), (x, np.roll(y, 1, 0)), (swapped, y), (x[:, ::-1], y)]
    assert len({rows_digest(*rows) for rows in [(x, y), *others]}) == 5


def test_images_of_bytes_have_a_digest():
    x = np.arange(24, dtype=np.uint8).reshape(4, 6)
    assert rows_digest(x) == rows_digest(x[::-1]) != rows_digest(x + 1)


def test_numbers_of_numpy_are_written_and_what_is_none_leaves_no_file(tmp_path):
    chain = Chain(units=[np.prod((2, 3))])
    chain.append(0, params=[numbers(6)])
    certificate.write(tmp_path / "a.json", {"a": chain}, {})
    assert certificate.read(tmp_path / "a.json")["settings"]["unit_numels"] == [6]
    with pytest.raises(TypeError):
        certificate.write(tmp_path / "b.json", {"a": chain}, {"object": object()})
    assert not (tmp_path / "b.json").exists()


def test_schemes_and_other_rows_are_causes_of_their_own(tmp_path, capsys):
    """Schemes that part by when they reduce, and numbers of ranks that see other rows."""

    def text(differ, **changes):
        parted = certificate.Comparison("a", "b", 1, 2, 1, "gradient", 0, "unknown", [])._replace(**changes)
        return " ".join(" ".join(compare.lines("A", "B", [parted], differ)).split())

    assert "another scheme may add micro-batches up" in text([("scheme", "zero1", "zero3")])
    assert "Nothing in the settings explains it. Digests show no element" in text([("steps", 1, 2)])
    data = {"phase": "data", "unit": None, "cause": "different data"}
    said = text([("ranks", 2, 3), ("accumulate", 1, 2), ("precision", "mixed", "fp32")], **data)
    assert "takes other rows in a step" in said and "sums differently" not in said and "at rest" not in said
