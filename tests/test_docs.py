"""Every snippet of README and docs runs as it stands; every link leads somewhere; the site builds."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from unskew.console.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEP = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
LONG = {  # pages whose blocks train for long
    "analysis.md", "calibration.md", "compare.md", "determinism.md", "devices.md", "first-run.md", "local-training.md",
    "privacy.md", "protections.md", "reproduce.md",
}  # fmt: skip


def marks(page):
    return [pytest.mark.heavy] if page.name in LONG else []


SNIPPETS = [
    pytest.param(kind, text, id=f"{page.name}-{place}-{kind}", marks=marks(page))
    for page in PAGES
    if page not in TUTORIALS
    for place, (kind, text) in enumerate(BLOCK.findall(page.read_text()))
    if kind in ("python", "sh")
]


assert len(SNIPPETS) >= 4


@pytest.mark.parametrize(("kind", "text"), SNIPPETS)
def test_a_snippet_runs(kind, text, tmp_path, monkeypatch):
    """Python as it stands; of a shell block the lines that call unskew and need nothing from elsewhere."""
    monkeypatch.chdir(tmp_path)
    run_snippet(kind, text)


def run_snippet(kind, text):
    if kind == "python":
        exec(compile(text, "snippet", "exec"), {"__name__": "snippet"})
    elif kind == "sh":
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["unskew"] and "--data-dir" not in words:
                with pytest.raises(SystemExit) as ended:
                    main(words[1:])
                assert ended.value.code == 0, line


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem, marks=marks(page)) for page in TUTORIALS])
def test_a_tutorial_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """In one folder; a block with a title is a file that the reader saves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for kind, title, text in STEP.findall(page.read_text()):
        if title:
            Path(title).write_text(text)
            monkeypatch.delitem(sys.modules, Path(title).stem, raising=False)  # that of another page
        else:
            run_snippet(kind, text)
    for title in tmp_path.glob("*.py"):
        sys.modules.pop(title.stem, None)


def test_the_commands_of_the_federation_tutorial_exist_with_their_options(capsys):
    page = (ROOT / "docs" / "tutorials" / "federation.md").read_text()
    commands = [shlex.split(line)[1:] for line in re.findall(r"^\$ (unskew .*)", page, re.MULTILINE)]
    assert {words[1] for words in commands} >= {"init", "server", "node", "run", "status", "stop", "check", "demo"}
    for words in commands:
        with pytest.raises(SystemExit):
            main([*words[:2], "--help"])
        known = capsys.readouterr().out
        assert all(word in known for word in words if word.startswith("--")), words


def test_the_numbers_in_the_table_of_the_readme_are_in_the_records():
    table = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("\n\nOne seed")[0]
    paper = (ROOT / "recipes" / "results" / "tables" / "paper" / "ccvr" / "table2.md").read_text()
    speed = (ROOT / "benchmarks" / "results.md").read_text()
    accuracies = re.findall(r"(\d+\.\d\d(?: ± \d\.\d\d)?) %", table)
    rates = re.findall(r"\b(?:\d{1,2},)?\d{3}(?= [|(])", table)
    assert len(accuracies) == 12
    assert len(rates) == 8
    assert all(number in paper for number in accuracies)
    assert all(f"| {number} examples/s" in speed for number in rates)


def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    """Strict: every page is in the navigation, every link and anchor exists."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]*)"', page.read_text())
        loaded += re.findall(r'<link[^>]*\shref="([^"]*)"[^>]*rel="(?:stylesheet|preconnect)"', page.read_text())
        loaded += re.findall(r'<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*\shref="([^"]*)"', page.read_text())
        assert not [address for address in loaded if "//" in address], page


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_run_from_top_to_bottom_and_shows_no_error(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] or "=" in "".join(cell["source"]) for cell in cells)
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert not re.search(r"/tmp/|/home/|\\u001b", path.read_text())


@pytest.mark.heavy
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_gives_as_many_outputs_as_it_shows(path, tmp_path):
    """In a process of its own: the kernel's libraries warn."""
    script = ROOT / "docs" / "generate" / "notebooks.py"
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    code = f"import runpy; m = runpy.run_path({str(script)!r}); import nbformat, pathlib; " + (
        f"p = pathlib.Path({str(copy)!r}); nbformat.write(m['execute'](p, p.parent), p)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    cells, again = (json.loads(file.read_text())["cells"] for file in (path, copy))
    assert sum(len(cell.get("outputs", ())) for cell in cells) == sum(len(cell.get("outputs", ())) for cell in again)


PACKAGE = ROOT / "src" / "unskew"
EXAMPLE_FILES = {"mine.py"}  # what a page tells its reader to write


def missing_paths(text: str) -> list[str]:
    """The Python files and folders that a page names in code or in words, and that do not exist."""
    text = BLOCK.sub("", text)
    files = {*re.findall(r"`([\w./-]+\.py)`", text), *re.findall(r"\bsrc/unskew/[\w./]*\w", text)}
    folders = set(re.findall(r"`((?:src|tests|docs|recipes|benchmarks)/[\w./-]*)`", text))

    def is_there(path: str) -> bool:
        """Below the project or the package; a bare name anywhere in them."""
        if "/" in path:
            return (ROOT / path).exists() or (PACKAGE / path).exists()
        return any(ROOT.glob(path)) or any(next((ROOT / top).rglob(path), None) for top in ("src", "recipes", "docs"))

    return sorted(path for path in (files | folders) - EXAMPLE_FILES if not is_there(path))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere_and_every_path_that_a_page_names_exists(page):
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in target]
    assert [target for target in links if not (page.parent / target).exists()] == []
    assert missing_paths(page.read_text()) == []


def test_a_path_that_does_not_exist_is_noticed():
    text = "`round/driver.py` `driver.py`, `engines/memory.py` src/unskew/algorithm.py `tests/nowhere/` `memories.py`"
    assert missing_paths(text) == ["engines/memory.py", "memories.py", "src/unskew/algorithm.py", "tests/nowhere/"]


def test_every_recipe_is_a_recipe():
    from unskew.runs.config import checked, read

    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert recipes
    for recipe in recipes:
        checked(read(recipe))
