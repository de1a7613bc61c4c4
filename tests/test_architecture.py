"""The import graph is the one of the design: no cycles, no arrow that must not be there, no method named by others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sopdist.methods import METHODS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sopdist"

# Who must not import whom: packages or modules of sopdist, by prefix.
TOP = ("cli.commands", "compare", "demo", "bench", "doctor", "theory")
FORBIDDEN = {
    "errors": ("",),  # imports nobody
    "data": ("models", "methods", "noise", "sample_table", "train", "checkpoint", "export", "cli", *TOP),
    "sample_table": ("data", "models", "methods", "noise", "train", "checkpoint", "export", "cli", *TOP),
    "noise": ("data", "models", "methods", "train", "checkpoint", "export", "cli", *TOP),
    "models": ("data", "methods", "noise", "sample_table", "train", "export", "cli", *TOP),
    "methods": ("models", "train", "checkpoint", "export", "cli", *TOP),
    "checkpoint": ("data", "models", "methods", "noise", "train", "export", "cli", *TOP),
    "train": ("export", "noise", *TOP),
    "export": ("train", *TOP),
    "compare": ("noise", "sample_table", "models", "checkpoint", "export", "demo", "bench", "doctor"),
    "config": ("data", "models", "methods", "noise", "sample_table", "train", "checkpoint", "export", "cli", *TOP),
}
# Programs about particular methods may name them; everybody else asks `methods`.
# The time of a training is compared with that of cross-entropy.
MAY_NAME_METHODS = ("methods", "noise", "demo", "bench", "theory", "compare.results")


def modules() -> dict[str, Path]:
    """Every module of the package, without the leading `sopdist.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def top_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported: not those in functions or under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from top_level(node)


def imports_of(module: str, *, only_top_level: bool) -> set[str]:
    """The modules of sopdist that a module imports."""
    path = MODULES[module]
    tree = ast.parse(path.read_text())
    nodes = list(top_level(tree)) if only_top_level else list(ast.walk(tree))
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            names = [".".join(filter(None, [*base, name.name])) for name in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sopdist"):
            names = [f"{node.module}.{name.name}".removeprefix("sopdist").strip(".") for name in node.names]
        elif isinstance(node, ast.Import):
            names = [name.name.removeprefix("sopdist.") for name in node.names if name.name.startswith("sopdist.")]
        for name in names:
            while name not in MODULES:
                name = name.rpartition(".")[0]
            if name and name != module:
                found.add(name)
    return found


def is_in(module: str, package: str) -> bool:
    return not package or module == package or module.startswith(f"{package}.")


def test_the_graph_is_read_correctly() -> None:
    assert {"noise", "sample_table", "errors"} <= imports_of("methods.sop", only_top_level=False)
    assert "train.loop" in imports_of("train.run", only_top_level=False)
    assert "train.loop" not in imports_of("train.run", only_top_level=True)


def test_no_module_imports_itself_through_others() -> None:
    graph = {module: imports_of(module, only_top_level=True) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("package", FORBIDDEN)
def test_nobody_imports_what_the_design_forbids(package: str) -> None:
    leaves = ("cli.output", "cli.tables", "cli.units")  # text and files; they know nothing of commands
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if is_in(module, package) and module
        for other in imports_of(module, only_top_level=False)
        if any(is_in(other, forbidden) for forbidden in FORBIDDEN[package]) and not is_in(other, package)
        if other not in leaves
    ]
    assert not wrong


def test_nothing_outside_methods_and_noise_names_a_method() -> None:
    named = []
    for module, path in MODULES.items():
        if module and not any(is_in(module, allowed) for allowed in MAY_NAME_METHODS):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and node.value in METHODS:
                    named.append(f"{module}:{node.lineno}: {node.value!r}")
                if isinstance(node, ast.Attribute) and node.attr == "sop":
                    named.append(f"{module}:{node.lineno}: .sop")
            imported = imports_of(module, only_top_level=False)
            named += [f"{module} imports {other}" for other in imported if other.removeprefix("methods.") in METHODS]
    assert not named


def test_tests_mirror_the_package() -> None:
    """A folder of tests is a package of sopdist, or one of the few that test several."""
    shared = {"support", "e2e", "slurm"}
    for folder in sorted(path.parent for path in (ROOT / "tests").rglob("__init__.py")):
        place = folder.relative_to(ROOT / "tests")
        if place.parts and place.parts[0] not in shared:
            assert (PACKAGE / place).is_dir(), f"tests/{place} mirrors nothing"
