"""Imports go one way, modules stay small, public things are documented."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "unskew"
MODULES = sorted(ROOT.rglob("*.py"))

# a module may import from its own layer and from those before it
LAYERS = [
    {"core"},
    {"data", "models", "charts"},
    {"round"},
    {"calibration", "privacy"},
    {"methods"},
    {"engines"},
    {"runs"},
    {"checks", "analysis"},
    {"report", "loggers"},
    {"console", "api", "extend", "__init__"},
    {"__main__"},
]
LAYER = {name: place for place, layer in enumerate(LAYERS) for name in layer}


def layer_of(parts: tuple[str, ...]) -> int:
    return LAYER[parts[0] if parts else "__init__"]


def imports(path: Path) -> set[tuple[str, ...]]:
    """What a module imports from the package when it runs: what stands under TYPE_CHECKING does not count."""
    found = set()
    tree = ast.parse(path.read_text())
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
            found |= {(*base, alias.name) for alias in node.names} if not base else {base}
        elif isinstance(node, ast.Import):
            found |= {tuple(a.name.split("."))[1:] for a in node.names if a.name.split(".")[0] == "unskew"}
    return found


def name_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    own = layer_of(name_of(path))
    for target in imports(path):
        assert layer_of(target) <= own, f"{path.relative_to(ROOT)} imports unskew.{'.'.join(target)} from a layer above"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_outgrows_300_lines_and_each_says_why_it_exists(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert ast.get_docstring(ast.parse(text))


def test_types_import_nothing_of_ours():
    assert imports(ROOT / "core" / "types.py") == set()


def test_only_runs_and_fetch_write_files():
    writers = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                mode = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "r"
                if name in ("write_text", "write_bytes") or (name == "open" and set(str(mode)) & set("wax")):
                    writers.append(str(path.relative_to(ROOT)))
    assert set(writers) <= {"core/files.py", "runs/folder.py", "runs/metrics.py", "data/fetch.py"}
