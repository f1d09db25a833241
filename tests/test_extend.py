"""unskew.extend has every promised name, says what each is for, and is quick to import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unskew.extend as extend

PROMISED = """Algorithm, Loss, Step, Visit, Visited, Local, Statistic, Memory, ServerOptimizer, Margin, Term, Finisher,
    Measure, ImageSet, Split, Roster, Engine, Outcome, Key, UserError, check_method""".replace(",", " ").split()
SOURCE = ast.parse(Path(extend.__file__).read_text())


def test_every_promised_name_is_there():
    assert set(PROMISED) <= set(extend.__all__)


@pytest.mark.parametrize("name", extend.__all__)
def test_a_name_is_public_documented_and_explained_on_the_page(name):
    value = getattr(extend, name)
    assert not name.startswith("_")
    assert not getattr(value, "__name__", name).startswith("_")
    assert re.search(rf"\b{name}\b", extend.__doc__ or ""), (
        f"the docstring of unskew.extend does not say what {name} is for"
    )
    if isinstance(value, type) or hasattr(value, "__code__"):
        assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_what_a_type_checker_sees_is_what_there_is():
    block = next(node for node in SOURCE.body if isinstance(node, ast.If))
    seen = {(alias.name, node.module) for node in block.body for alias in node.names}
    assert seen == {(name, f"unskew.{module}") for name, module in extend._HOME.items()}
    assert sorted(extend.__all__) == sorted(extend._HOME) == dir(extend)


def test_it_only_passes_names_on():
    assert not [node for node in SOURCE.body if isinstance(node, ast.ClassDef)]
    functions = [node.name for node in SOURCE.body if isinstance(node, ast.FunctionDef)]
    assert functions == ["__getattr__", "__dir__"]


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError, match="Algorthm"):
        from unskew.extend import Algorthm  # noqa: F401


def test_importing_it_imports_nothing_heavy():
    code = "import sys, unskew.extend; print([m for m in ('torch', 'numpy', 'PIL') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
