"""Every notebook runs from top to bottom in an empty folder, and is kept in git without its outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"clear the outputs of {path.name}"


def executed(name: str, folder: Path, monkeypatch) -> nbformat.NotebookNode:
    """The notebook with its outputs; a cell that raises fails the test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> tuple[str, int]:
    """Everything printed, and the number of pictures."""
    every = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in every if output.output_type == "stream" and output.name == "stdout")
    return text, sum("image/png" in output.get("data", {}) for output in every)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_first_moe(tmp_path, monkeypatch):
    """It learns, its pictures are there, and what it says of the balance loss is what comes out."""
    text, pictures = outputs(executed("01_first_moe.ipynb", tmp_path, monkeypatch))
    assert pictures == 5
    first, last, held_out = map(float, re.search(r"loss: ([\d.]+) -> ([\d.]+) .*?([\d.]+)$", text, re.M).groups())
    assert first > 5 and last < 2.9 and held_out < 2.9
    with_loss, without = (
        float(re.search(rf"^ *{name}: .*fullest expert ([\d.]+) times", text, re.M)[1])
        for name in ("with the balance loss", "without")
    )
    assert with_loss < without
