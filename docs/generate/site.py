"""MkDocs hooks: pages from outside docs/ join the site, and every link works both in the repository and on the site."""

import ast
import base64
import json
import logging
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
PACKAGE = ROOT / "src" / "unskew"
RESULTS = ROOT / "recipes" / "results"
OUTSIDE = {
    ROOT / "CHANGELOG.md": "project/changelog.md",
    ROOT / "CODE_OF_CONDUCT.md": "project/conduct.md",
    ROOT / "CONTRIBUTING.md": "project/contributing.md",
    ROOT / "SECURITY.md": "project/security.md",
    ROOT / "benchmarks" / "results.md": "results/speed.md",
    RESULTS / "README.md": "results/index.md",
    **{path: f"results/{path.relative_to(RESULTS)}" for path in RESULTS.rglob("*.md") if path.name != "README.md"},
    **{path: f"results/{path.relative_to(RESULTS)}" for path in RESULTS.rglob("*.svg")},
}
TABLES = {
    "reference/commands.md": "commands",
    "reference/methods/index.md": "methods",
    "reference/options.md": "options",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)

log = logging.getLogger("mkdocs.plugins")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are kept outside docs/."""
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/modules.md", content=modules_page()))
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        place = f"notebooks/{path.stem}"
        text, pictures = notebook_page(json.loads(path.read_text(encoding="utf-8")), path.stem)
        files.append(File.generated(config, f"{place}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def modules_page() -> str:
    """Every module with the first paragraph of its docstring, a table per package."""
    parts = ["# Modules", "Paths are below `src/unskew/`; tests are in the folder of the same name in `tests/`."]
    for folder in [PACKAGE, *sorted(path for path in PACKAGE.rglob("*") if (path / "__init__.py").exists())]:
        name = folder.relative_to(PACKAGE).as_posix()
        rows = [f"| `{path.name}` | {_summary(path)} |" for path in sorted(folder.glob("*.py"))]
        parts += [f"## `{name}/`" if folder != PACKAGE else "## `unskew/`"]
        parts += ["\n".join(["| module | contents |", "| --- | --- |", *rows])]
    return "\n\n".join(parts) + "\n"


def _summary(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").replace("``", "`").replace("|", "\\|")


def notebook_page(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """A notebook with its stored outputs as Markdown, and its pictures by name."""
    parts, pictures = [], dict[str, bytes]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            elif "text/html" in data:
                parts.append(f'<div class="output">{"".join(data["text/html"])}</div>')
            else:
                parts.append("```text\n" + "".join(data.get("text/plain", output.get("text", ""))).rstrip() + "\n```")
    title, *rest = parts
    return "\n\n".join([title, f"Download [the notebook]({stem}.ipynb).", *rest]) + "\n", pictures


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links that leave docs/ or come from outside; separate lists and tables from the paragraph above."""
    if name := TABLES.get(page.file.src_uri):
        table: str = runpy.run_path(str(DOCS / "generate" / "tables.py"))[f"{name}_table"]()
        markdown = markdown.replace(f"<!-- {name} -->", table)
    source = Path(page.file.abs_src_path or "/")
    if source.parent == DOCS / "reference" / "methods":
        made = runpy.run_path(str(DOCS / "generate" / "tables.py"))
        markdown = markdown.replace("<!-- knobs -->", made["knobs_table"](source))
        markdown = markdown.replace("<!-- references -->", made["references_of"](source))
    if not source.is_relative_to(ROOT):
        return markdown
    parts, end = [], 0
    for block in FENCE.finditer(markdown):
        parts += [_prose(markdown[end : block.start()], source, page.file.src_uri), block.group()]
        end = block.end()
    return "".join([*parts, _prose(markdown[end:], source, page.file.src_uri)])


def _prose(text: str, source: Path, uri: str) -> str:
    lines: list[str] = []
    for line in text.split("\n"):
        starts = re.match(r"(- |\d+\. |\|)", line)
        if starts and lines and lines[-1].strip() and not re.match(r"(\s|- |\d+\. |\||<!--)", lines[-1]):
            inside_item = any(re.match(r"(- |\d+\. )", above) for above in _paragraph(lines))
            if not inside_item:  # GitHub starts a list here, Python-Markdown only after an empty line
                lines.append("")
        lines.append(line)
    return LINK.sub(lambda match: _link(match, source, uri), "\n".join(lines))


def _paragraph(lines: list[str]) -> list[str]:
    start = max((number for number, line in enumerate(lines) if not line.strip()), default=-1)
    return lines[start + 1 :]


def _link(match: re.Match[str], source: Path, uri: str) -> str:
    image, text, target = match.groups()
    path, _, anchor = target.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return match.group()
    full = (source.parent / path).resolve()
    if full.is_relative_to(DOCS) and not full.is_relative_to(DOCS / "generate"):
        place = full.relative_to(DOCS).as_posix().replace(".ipynb", ".md")
    elif full in OUTSIDE:
        place = OUTSIDE[full]
    elif full.exists():  # code: named, not part of the site
        name = full.relative_to(ROOT).as_posix()
        return text if name in text else f"{text} (`{name}`)"
    else:
        log.warning("%s links to %s, which does not exist", source.relative_to(ROOT), target)
        return match.group()
    up = "../" * uri.count("/")
    return f"{image}[{text}]({up}{place}{'#' + anchor if anchor else ''})"
