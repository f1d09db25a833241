"""Imports go one way and never in a circle, and the laws of docs/explanation/architecture.md have their tests."""

import ast
import importlib.util
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "unskew"
MODULES = sorted(ROOT.rglob("*.py"))
PROJECT = Path(__file__).parent.parent
PAGE = PROJECT / "docs" / "explanation" / "architecture.md"

# a module may import from its own layer and from those before it
LAYERS = [
    {"core"},
    {"data", "models", "charts"},
    {"round"},
    {"calibration", "privacy"},
    {"methods"},
    {"engines"},
    {"runs"},
    {"checks", "analysis", "sweeps"},
    {"report", "loggers", "federation"},
    {"reproduce"},
    {"console", "api", "extend", "flower", "__init__"},
    {"__main__"},
]
LAYER = {name: place for place, layer in enumerate(LAYERS) for name in layer}


def layer_of(parts: tuple[str, ...]) -> int:
    return LAYER[parts[0] if parts else "__init__"]


def imports(path: Path) -> set[tuple[str, ...]]:
    """What a module imports from the package when it runs: what is under TYPE_CHECKING does not count."""
    return {base or tuple(filter(None, [name])) for base, name in imported_names(ast.parse(path.read_text()))}


def imported_names(tree: ast.Module) -> set[tuple[tuple[str, ...], str]]:
    """Module and name of every runtime import from the package, those inside functions included."""
    names = set()
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "unskew":
            base = tuple((node.module or "").split("."))[1:]
            names |= {(base, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {(tuple(a.name.split("."))[1:], "") for a in node.names if a.name.split(".")[0] == "unskew"}
    return names


def import_graph(sources: dict[tuple[str, ...], str]) -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The modules that each module imports; ``from package import module`` imports the module."""
    graph = {}
    for own, source in sources.items():
        names = imported_names(ast.parse(source))
        graph[own] = {(*base, name) if (*base, name) in sources else base for base, name in names} - {own}
    return graph


def cycle(sources: dict[tuple[str, ...], str]) -> str:
    """A circle of imports, in words; empty where there is none."""
    try:
        TopologicalSorter(import_graph(sources)).prepare()
    except CycleError as error:
        return " -> ".join(".".join(name) or "unskew" for name in reversed(error.args[1]))
    return ""


def key_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    own = layer_of(key_of(path))
    for target in imports(path):
        assert layer_of(target) <= own, f"{path.relative_to(ROOT)} imports unskew.{'.'.join(target)} from a layer above"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_has_a_docstring_for_the_page_of_modules(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_modules_do_not_import_each_other_in_a_circle():
    assert cycle({key_of(path): path.read_text() for path in MODULES}) == ""


def test_calibration_imports_privacy_and_never_the_other_way_round():
    upwards = [
        path.name for path in (ROOT / "privacy").glob("*.py") if ("calibration",) in {i[:1] for i in imports(path)}
    ]
    assert upwards == []


def test_a_circle_is_seen_through_a_function_and_through_a_package():
    late = "def f():\n    from unskew.a import b\n"
    assert cycle({("a",): "", ("a", "b"): "from unskew.a.c import x", ("a", "c"): late}) == "a.b -> a.c -> a.b"
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from unskew.a import b\n"
    assert cycle({("a",): "", ("a", "b"): "from unskew.a.c import x", ("a", "c"): typing}) == ""


def test_the_page_names_every_law_and_tests_that_exist():
    laws = PAGE.read_text().partition("## The laws")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", laws, re.MULTILINE)] == list(range(1, 12))
    tests = re.findall(r"`tests/(\S+?\.py)`(?:, `(test_\w+)`)?", laws)
    assert len(tests) >= 11
    for file, test in tests:
        text = (Path(__file__).parent / file).read_text()
        assert f"def {test}(" in text if test else text, (file, test)


def test_types_import_nothing_of_ours():
    assert imports(ROOT / "core" / "types.py") == set()


WRITES = {"write_text", "write_bytes", "pwrite", "pwritev", "writev", "ftruncate", "truncate", "sendfile", "copyfile"}


def writes_files(path):
    """Whether a module opens a file for writing, or writes to a path or descriptor other than the standard streams."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name, call = getattr(node.func, "attr", getattr(node.func, "id", "")), ast.unparse(node)
        if name in WRITES or (name == "open" and re.search(r"[(=, ]'[rbt]*[wax+][rbt+]*'", call)):
            return True
        if re.match(r"os\.open\((?!os\.devnull).*O_(RDWR|WRONLY|CREAT)|os\.write\((?![12],)", call, re.DOTALL):
            return True
    return False


def test_only_these_modules_write_files():
    assert {str(path.relative_to(ROOT)) for path in MODULES if writes_files(path)} <= {
        "core/child.py",  # logs of programs, and the kernel's file for a session's priority
        "core/files.py",
        "data/fetch.py",
        "data/store.py",
        "engines/flower/audit.py",  # a log that only grows
        "engines/features.py",
        "engines/pool.py",
        "engines/results.py",
        "federation/flower.py",  # a task's token, in memory
        "engines/torchrun.py",  # unnamed files: copies of rank 0's on another machine
        "privacy/sessions.py",
        "round/client_memory.py",
        "runs/checkpoint.py",
        "runs/folder.py",
        "runs/journal.py",
    }


def test_the_search_for_writers_sees_every_way_to_write(tmp_path):
    for text in (
        "open(path, 'wb')",
        "open(path, mode='r+')",
        "path.open('a')",
        "path.write_text('')",
        "os.open(path, os.O_RDWR)",
        "os.write(file, b'')",
        "os.pwrite(file, b'', 0)",
        "os.ftruncate(file, 3)",
    ):
        (tmp_path / "module.py").write_text(text)
        assert writes_files(tmp_path / "module.py"), text
    for text in ("open(path)", "path.open('rb')", "os.write(2, b'interrupted')", "os.open(path, os.O_RDONLY)"):
        (tmp_path / "module.py").write_text(text)
        assert not writes_files(tmp_path / "module.py"), text


SCRIPTS = [path for folder in ("benchmarks", "docs", "recipes") for path in sorted((PROJECT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_what_scripts_outside_the_package_import_from_it_is_there(path):
    """The tests do not run benchmarks and the scripts of docs: a renamed module would break them unseen."""
    for base, name in imported_names(ast.parse(path.read_text())):
        module = ".".join(("unskew", *base))
        found = importlib.import_module(module)
        assert not name or hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"
