"""Runs the notebooks in docs/notebooks and stores their outputs: `make notebooks`."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs, run in this folder; its path and volatile metadata are left out."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    text = nbformat.writes(notebook).replace(f"{folder}/", "")
    return nbformat.reads(text, as_version=4)


if __name__ == "__main__":
    for path in [path for path in NOTEBOOKS if path.stem in (sys.argv[1:] or path.stem)]:
        with tempfile.TemporaryDirectory() as work:
            nbformat.write(execute(path, Path(work)), path)
