"""The house: imports go one way, scheme files stay small, one file talks to MPI."""

import ast
import difflib
from pathlib import Path

import pytest

import zero_mpi

PACKAGE = Path(zero_mpi.__file__).parent

# What each module may import of ours. A line added here is a wall taken down: think twice.
ALLOWED = {
    "__init__": set(),
    "__main__": {"cli", "memory"},
    "layout": set(),
    "formulas": set(),
    "memory": set(),
    "traffic": set(),
    "transport": set(),
    "comm": {"layout", "traffic", "transport"},
    "precision": set(),
    "optim": {"precision"},
    "training": {"precision"},
    "data": set(),
    "digest": set(),
    "certificate": {"digest"},
    "model.protocol": set(),
    "model.mlp": set(),
    "model.__init__": {"model.mlp", "model.protocol"},
    "ring": {"comm", "layout"},
    "reducers": {"comm", "layout", "memory", "ring"},
    "engine": {"comm", "data", "memory", "schemes.base", "traffic"},
    "schemes.base": {
        "comm",
        "data",
        "engine",
        "layout",
        "memory",
        "model",
        "optim",
        "precision",
        "reducers",
        "traffic",
        "training",
    },
    "schemes.dp": {"schemes.base"},
    "schemes.zero1": {"schemes.base"},
    "schemes.zero2": {"schemes.base"},
    "schemes.zero3": {"schemes.base"},
    "schemes.__init__": {
        "formulas",
        "schemes.base",
        "schemes.dp",
        "schemes.zero1",
        "schemes.zero2",
        "schemes.zero3",
    },
    "reference": {"data", "memory", "model", "optim", "precision", "training"},
    "checks": {
        "comm",
        "data",
        "digest",
        "formulas",
        "optim",
        "precision",
        "schemes",
        "schemes.base",
    },
    "parting": {"comm", "precision", "reference", "schemes"},
    "run": {
        "certificate",
        "injection",
        "parting",
        "checks",
        "comm",
        "data",
        "engine",
        "formulas",
        "memory",
        "model",
        "optim",
        "precision",
        "reducers",
        "reference",
        "schemes",
        "training",
    },
    "report": {"comm"},
    "bench": {"arguments", "comm", "fit", "layout", "report", "ring"},
    "fit": {"checks", "formulas", "run", "schemes"},
    "injection": {"data", "model", "precision", "schemes"},
    "arguments": {"precision", "training"},
    "train": {
        "__init__",
        "arguments",
        "certificate",
        "comm",
        "data",
        "engine",
        "fit",
        "injection",
        "model",
        "optim",
        "precision",
        "reducers",
        "report",
        "run",
        "schemes",
        "training",
    },
    "compare": {"arguments", "certificate", "comm", "report"},
    "faults": {
        "arguments",
        "comm",
        "data",
        "engine",
        "injection",
        "model",
        "optim",
        "precision",
        "report",
        "run",
        "schemes",
        "training",
    },
    "orders": {
        "arguments",
        "checks",
        "comm",
        "data",
        "fit",
        "model",
        "optim",
        "parting",
        "precision",
        "reducers",
        "reference",
        "report",
        "run",
        "schemes",
    },
    "cli": {
        "__init__",
        "bench",
        "comm",
        "compare",
        "engine",
        "faults",
        "orders",
        "report",
        "train",
        "transport",
    },
}


def modules():
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imports_of_ours(name, path):
    """Return our modules that `path` imports, anywhere in it."""
    here = name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1]
            if node.module:
                found.add(".".join([*base, node.module]))
            else:
                for alias in node.names:
                    target = ".".join([*base, alias.name])
                    known = target in modules() or f"{target}.__init__" in modules()
                    found.add(target if known else ".".join([*base, "__init__"]))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            assert not any(n.split(".")[0] == "zero_mpi" for n in names), "imports of ours are relative"
    return found


def test_every_module_has_its_place():
    assert set(modules()) == set(ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
def test_imports_go_one_way(name):
    assert imports_of_ours(name, modules()[name]) == ALLOWED[name]


def test_the_engine_knows_schemes_by_name_only():
    source = modules()["engine"].read_text()
    assert "if TYPE_CHECKING:\n    from .schemes.base import Scheme" in source


def test_only_the_transport_talks_to_mpi():
    def talks(path):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        return any(
            name.split(".")[0] == "mpi4py"
            for name in plain + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        )

    assert [name for name, path in modules().items() if talks(path)] == ["transport"]


@pytest.mark.parametrize("name", ["dp", "zero1", "zero2", "zero3"])
def test_a_scheme_file_is_its_row_of_the_table(name):
    source = modules()[f"schemes.{name}"].read_text()
    assert len(source.splitlines()) <= 60
    tree = ast.parse(source)
    (cls,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = [node.name for node in cls.body if isinstance(node, ast.FunctionDef)]
    assert methods == ["full_params", "release_params", "grad_ready", "backward_done", "update"]
    assert [base.id for base in cls.bases] == ["Scheme"]
    decides = (ast.If, ast.IfExp, ast.Try, ast.While, ast.Match, ast.BoolOp, ast.Compare, ast.Lambda)
    assert not any(isinstance(node, decides) for node in ast.walk(tree))


@pytest.mark.parametrize("a, b, most", [("dp", "zero1", 14), ("zero1", "zero2", 14), ("zero2", "zero3", 12)])
def test_a_diff_of_neighbours_shows_the_idea_and_only_the_idea(a, b, most):
    texts = [modules()[f"schemes.{name}"].read_text().splitlines() for name in (a, b)]
    # Between the docstrings, which say it in words: the code that differs.
    code = [text[text.index("from .base import Scheme") :] for text in texts]
    changed = [line for line in difflib.ndiff(*code) if line[0] in "+-"]
    assert len(changed) <= 2 * most, "\n".join(changed)


@pytest.mark.parametrize("name", ALLOWED)
def test_every_module_says_what_it_is_not_for(name):
    doc = ast.get_docstring(ast.parse(modules()[name].read_text()))
    assert doc and "Not for:" in doc


def test_the_package_never_asserts():
    for path in modules().values():
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path
