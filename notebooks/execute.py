"""Run the notebooks, and write each as `.ipynb` with what its cells show. A notebook's source is its `.py`.

make notebooks
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def write(source: Path) -> None:
    """Execute a notebook in an empty folder and write it beside its source."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # by default it is random, and every run would change every cell
    notebook.metadata = METADATA
    with TemporaryDirectory() as folder:
        NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_progress(output)]
    notebook.metadata = METADATA
    nbformat.write(notebook, source.with_suffix(".ipynb"))


def is_progress(output: nbformat.NotebookNode) -> bool:
    """Whether it is a progress bar or a warning, and no result."""
    return output.get("name") == "stderr" or "application/vnd.jupyter.widget-view+json" in output.get("data", {})


if __name__ == "__main__":
    for source in sorted(FOLDER.glob("*.py")):
        if source != Path(__file__).resolve():
            write(source)
