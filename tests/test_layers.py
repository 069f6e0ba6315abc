"""The floors of the house: a module imports only lower ones, and nothing imports in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import minidist

ROOT = Path(minidist.__file__).parent

# From the ground up; the names on one line are one floor.
FLOORS = [
    ["errors", "threads", "patience", "observe", "dtypes", "protobuf"],
    ["kernels"],
    ["device"],
    [
        "tensor",
        "indexed_slices",
        "tape",
        "ops",
        "structure",
        "device_map",
        "delegate",
        "values",
        "regrouping",
        "context",
        "pool",
        "replica",
        "run",
        "diagnosis",
        "traffic",
        "comm",
        "cluster",
        "slot",
        "staging",
        "random",
        "initializers",
        "tfrecord",
    ],
    ["variable", "moving_average", "creation", "assigning", "readable", "sync_on_read"],
    ["nn", "optim", "models", "metrics", "summary", "increment", "trace"],
    ["variable_mgr"],
    [
        "strategy",
        "default_strategy",
        "destinations",
        "parts",
        "reduction",
        "gathering",
        "updating",
        "input",
        "steps",
        "padding",
        "tensor_file",
        "state",
        "checkpoint",
        "train_dir",
        "data",
        "instruments",
        "checking",
        "server",
    ],
    ["train"],
    ["bench", "comm_bench", "doctor", "launch"],
]
COMMANDS = FLOORS[-1]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}


def imports(path):
    """Return the minidist modules that a file imports when it is run, as dotted names."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "minidist"
        ):
            for alias in node.names:
                inside = ROOT.parent.joinpath(*node.module.split("."), alias.name)
                is_module = (
                    inside.is_dir()
                    or inside.with_suffix(".py").exists()
                    or node.module == "minidist.kernels"
                )
                found.add(f"{node.module}.{alias.name}" if is_module else node.module)
        elif isinstance(node, ast.Import):
            found.update(
                alias.name for alias in node.names if alias.name.split(".")[0] == "minidist"
            )
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name(path): path for path in sorted(ROOT.rglob("*.py"))}
GRAPH = {module: imports(path) for module, path in MODULES.items()}


def top(module):
    return module.split(".")[1] if "." in module else ""


def test_every_module_has_a_floor():
    assert {top(module) for module in MODULES} - {""} <= set(FLOOR)


@pytest.mark.parametrize("module", [module for module in MODULES if "." in module])
def test_a_module_imports_only_its_own_floor_and_lower_ones(module):
    for imported in GRAPH[module]:
        if imported == "minidist":
            assert top(module) in COMMANDS, f"{module} imports minidist as a whole"
        else:
            assert FLOOR[top(imported)] <= FLOOR[top(module)], (
                f"{module} imports {imported}, which is above it"
            )


def test_nothing_imports_in_a_circle():
    done, path = set(), []

    def visit(module):
        assert module not in path, " imports ".join([*path[path.index(module) :], module])
        if module in done or module not in GRAPH:
            return
        path.append(module)
        for imported in GRAPH[module]:
            visit(imported)
        done.add(path.pop())

    for module in GRAPH:
        if module != "minidist" and top(module) not in COMMANDS:
            visit(module)


ALLOWED = {
    "comm/implementation.py": {"mpi4py"},
    "comm/nccl_library.py": {"cupy", "nccl"},
    "device/__init__.py": {"cupy"},
    "device/cuda_dnn.py": {"cudnn", "cupy"},
    "doctor/cuda.py": {"cupy"},
    "instruments/nvtx.py": {"cupy"},
}


def packages(node):
    """Return the packages that a statement or a call imports by name."""
    names = []
    match node:
        case ast.Import():
            names = [alias.name for alias in node.names]
        case ast.ImportFrom():
            names = [node.module or ""]
        case ast.Call(
            func=ast.Name(id=function) | ast.Attribute(attr=function),
            args=[ast.Constant(value=str(name)), *_],
        ) if function.endswith("import_module"):
            names = [name]
    return {item.split(".")[0] for item in names}


@pytest.mark.parametrize(
    "line",
    [
        "import cudnn.graph",
        "from cudnn import pygraph",
        'import_module("cudnn")',
        'x = importlib.import_module("cudnn")',
    ],
)
def test_every_way_to_import_a_package_is_seen(line):
    assert "cudnn" in set().union(*map(packages, ast.walk(ast.parse(line))))


def test_cupy_cudnn_nccl_and_mpi_are_imported_nowhere_they_are_not_needed():
    for path in MODULES.values():
        module = str(path.relative_to(ROOT))
        allowed = ALLOWED.get(module, {"cupy"} if module.startswith("device/cuda") else set())
        for node in ast.walk(ast.parse(path.read_text())):
            assert packages(node) & {"cupy", "cudnn", "nccl", "mpi4py"} <= allowed, path


def test_import_brings_in_no_more_than_it_must_and_starts_nothing():
    program = (
        "import sys, threading, minidist; "
        "heavy = {'cupy', 'cudnn', 'mpi4py', 'nccl', 'rich', 'threadpoolctl', 'safetensors', "
        "'pytest', 'matplotlib'}; "
        "print(sorted(heavy & set(sys.modules)), threading.active_count())"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert out == "[] 1\n"
