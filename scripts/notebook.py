"""Execute a notebook of notebooks/ and keep the executed copy under results/notebooks.

python -m scripts.notebook fig3a_lr_hmda            # all data sources that have runs
python -m scripts.notebook fig3a_lr_hmda --in-place # refresh the committed outputs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from cdgrab.config import ROOT
from cdgrab.errors import CdgrabError


def execute(name: str, in_place: bool = False) -> Path:
    """The path of the executed notebook."""
    source = ROOT / "notebooks" / f"{name}.ipynb"
    target = source if in_place else ROOT / "results" / "notebooks" / source.name
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
        config=Config({"KernelManager": {"transport": "ipc"}}),  # local sockets: no port is opened
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise CdgrabError(f"notebook {name} failed: {error.ename}: {error.evalue}") from error
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)  # time stamps would make every execution a change
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
    parser.add_argument("--in-place", action="store_true")
    arguments = parser.parse_args()
    try:
        print(execute(arguments.name, arguments.in_place))
    except CdgrabError as error:
        if "no finished runs" in str(error):
            print(f"skipped: {error}")
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
