"""Notebooks without Jupyter: run their cells, keep what they show, write them as Markdown.

`python docs/notebooks.py` runs the notebooks of the gallery and keeps their outputs in the files.
"""

import ast
import base64
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

GALLERY = Path(__file__).parent / "gallery"


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that hold code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the cells of a notebook in one namespace, in the current folder.

    Each cell's outputs are replaced: what it printed, its last value unless a semicolon ends it,
    and the figures of matplotlib that it left open, as PNG.

    Args:
        notebook: the content of an ``.ipynb`` file, which is changed.

    Returns:
        The names that the cells defined.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        source = "".join(cell["source"])
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, "<cell>", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        is_shown = value is not None and not source.endswith(";")
        text = printed.getvalue() + (repr(value) if is_shown else "")
        cell["execution_count"] = number
        cell["outputs"] = [_text(text)] if text else []
        cell["outputs"] += [_picture(figure) for figure in _figures()]
    return names


def _text(text: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}


def _picture(png: bytes) -> dict[str, Any]:
    data = {"image/png": base64.b64encode(png).decode()}
    return {"output_type": "display_data", "metadata": {}, "data": data}


def _figures() -> list[bytes]:
    """Return matplotlib's open figures as PNG, and close them."""
    from matplotlib import pyplot as plt

    pictures = []
    for number in plt.get_fignums():
        buffer = io.BytesIO()
        plt.figure(number).savefig(buffer, format="png", dpi=80, metadata={"Software": None})
        pictures.append(buffer.getvalue())
    plt.close("all")
    return pictures


def to_markdown(notebook: dict[str, Any]) -> str:
    """Return a notebook as a page: text, code, and what the code showed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if text := "".join(output.get("text", [])):
                parts.append(f"```text\n{text.rstrip()}\n```")
            if png := output.get("data", {}).get("image/png"):
                alt = cell["metadata"].get("alt", "")
                parts.append(f'<img alt="{alt}" src="data:image/png;base64,{png}">')
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run all notebooks of the gallery, each in an empty folder, and keep their outputs."""
    for path in sorted(GALLERY.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run(notebook)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "agg"
    main()
