"""Execute notebooks of notebooks/ and keep the executed copies under results/notebooks.

python -m scripts.notebook fig3a_lr_hmda            # all data sources that have runs
python -m scripts.notebook --in-place               # all notebooks: refresh the committed outputs
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path

import nbformat
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from traitlets.config import Config

from cdgrab.errors import CdgrabError
from experiments.store.files import ROOT
from scripts.arguments import Parser

FOLDER = ROOT / "notebooks"
# What a notebook finds: this process's settings, and nothing of the notebooks before it.
FRESH_START = """
import os, sys
for name in [name for name in os.environ if name.startswith("CDGRAB_")]:
    del os.environ[name]
os.environ.update({settings})
if sys.path[0] != {root}:  # this checkout's cdgrab, whatever PYTHONPATH names
    sys.path.insert(0, {root})
if "matplotlib.pyplot" in sys.modules:
    sys.modules["matplotlib.pyplot"].close("all")
get_ipython().reset()
get_ipython().execution_count = 0
"""


def execute(name: str, in_place: bool = False) -> Path:
    """The path of the executed notebook."""
    source = FOLDER / f"{name}.ipynb"
    target = source if in_place else ROOT / "results" / "notebooks" / source.name
    notebook = nbformat.read(source, as_version=4)
    settings = {key: value for key, value in os.environ.items() if key.startswith("CDGRAB_")}
    fresh = FRESH_START.replace("{settings}", repr(settings)).replace("{root}", repr(str(ROOT)))
    start = nbformat.v4.new_code_cell(fresh)
    try:
        for some in (nbformat.v4.new_notebook(cells=[start]), notebook):
            _run(some)
    except CellExecutionError as error:
        raise CdgrabError(f"notebook {name} failed: {error.ename}: {error.evalue}") from error
    except RuntimeError as error:  # its process did not start, or ended
        _client.cache_clear()
        raise CdgrabError(f"notebook {name} failed: {error}") from error
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)  # time stamps would make every execution a change
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return target


def _run(notebook: nbformat.NotebookNode) -> None:
    """In the common process. Signals keep their meaning, which nbclient takes away."""
    client, handlers = _client(), {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    client.nb = notebook
    try:
        client.execute(cleanup_kc=False)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@cache
def _client() -> NotebookClient:
    """All notebooks run in one process, started for the first: most of a short notebook's time are its imports."""
    sockets = tempfile.TemporaryDirectory(prefix="cdgrab-")
    client = NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=600,
        startup_timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
        config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets.name}/socket"}}),  # no port is opened
    )

    @atexit.register
    def end() -> None:
        if client.km and client.km.has_kernel:
            run_sync(client.km.shutdown_kernel)(now=True)
        sockets.cleanup()

    return client


def main() -> int:
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser = Parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names)}; none: all of them")
    parser.add_argument("--in-place", action="store_true")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names):
        parser.error(f"unknown notebook {min(unknown)!r}; the notebooks are {', '.join(names)}")
    status = 0
    for name in arguments.names or names:
        try:
            print(execute(name, arguments.in_place), flush=True)
        except CdgrabError as error:
            if "no finished runs" in str(error):
                print(f"skipped: {error}", flush=True)
            else:
                print(f"error: {error}", file=sys.stderr, flush=True)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
