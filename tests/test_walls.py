"""Which room may import which: one table. A room is a folder, or a file at the top level. And how long a file may be."""

import ast
import os

import pytest

from tests.helpers import ROOT

LIBRARY = ("gns", "ln_kernel", "rightbatch")
# a room -> the rooms that its files may import, at the top or inside functions
ALLOWED = {
    "system": (),
    "gns": (),
    "ln_kernel": ("rightbatch",),  # its kernels; inside functions, for rightbatch takes ln_kernel as a part of itself
    "rightbatch": ("gns", "ln_kernel"),
    "schedule": ("gns", "rightbatch", "system"),
    "configurator": ("rightbatch", "schedule", "system"),
    "config": (),
    "data": ("system",),
    "model": ("ln_kernel", "rightbatch"),
    "trainer": (*LIBRARY, "configurator", "data", "plots", "schedule", "system"),  # plots: a run's closing picture
    "train": (*LIBRARY, "configurator", "model", "schedule", "system", "trainer"),
    "plots": (*LIBRARY, "configurator", "model", "schedule", "system", "trainer"),
    "sweeps": (*LIBRARY, "configurator", "model", "plots", "schedule", "system", "train", "trainer"),
    "benchmarks": (*LIBRARY, "configurator", "model", "schedule", "system", "trainer"),
    "whatif": (*LIBRARY, "configurator", "plots", "schedule", "system", "trainer"),
    "sample": ("data", "model", "system", "trainer"),
    "export": ("sample", "system", "trainer"),
    "plot": ("plots", "system"),
    "sweep": ("sweeps", "system"),
    "bench": ("benchmarks", "system"),
    "examples": LIBRARY,
}
OUTSIDE = ("experiments", "results", "tests")  # they may import every room, and no room imports them


def python_files():
    """Paths of this repository's files: what a run or an environment leaves there is none."""
    paths = []
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in ("out", "wandb", "build")]
        paths += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names if name.endswith(".py")]
    return sorted(paths)


def module_of(path):
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def room_of(module):
    return module.split(".")[0]


def imports(path, modules):
    """The modules of this repository that a file imports, also inside functions."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        tree = ast.parse(f.read())
    named = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in modules else node.module for a in node.names}
    return named & modules - {module_of(path)}


@pytest.fixture(scope="module")
def edges():
    """{module: modules that it imports}, of all rooms."""
    paths = [path for path in python_files() if room_of(module_of(path)) not in OUTSIDE]
    modules = {module_of(path) for path in python_files()}
    return {module_of(path): imports(path, modules) for path in paths}


def test_a_room_imports_only_the_rooms_of_the_table(edges):
    crossing = {(module, other) for module, others in edges.items() for other in others if room_of(module) != room_of(other)}
    assert crossing, "nothing was read"
    wrong = [f"{module} -> {other}" for module, other in crossing if room_of(other) not in ALLOWED[room_of(module)]]
    assert not wrong, sorted(wrong)


def test_the_table_lists_every_room_and_no_other(edges):
    assert {room_of(module) for module in edges} == set(ALLOWED)


def test_no_file_outside_of_the_tests_has_more_than_500_lines():
    long = {}
    for path in python_files():
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            long |= {path: n} if (n := sum(1 for _ in f)) > 500 and room_of(module_of(path)) != "tests" else {}
    assert long == {}


def test_no_import_leads_back_to_where_it_began(edges):
    """rightbatch and ln_kernel are one package, whose __init__ takes all of its parts."""
    edges = {module: {other for other in others if other != "rightbatch"} for module, others in edges.items()
             if module not in ("rightbatch", "ln_kernel")}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module):], module])
        if module not in done:
            path.append(module)
            for other in sorted(edges.get(module, ())):
                visit(other)
            done.add(path.pop())
    for module in edges:
        visit(module)
