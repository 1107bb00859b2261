"""Executes notebooks in this process: for a short one, starting a kernel would take most of the time."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cdgrab.errors import CdgrabError
from experiments.store.files import ROOT

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from nbformat import NotebookNode

FOLDER = ROOT / "notebooks"
LARGE, COLOURS = 2**18, 128  # bytes of a picture that gets a palette, and how many colours are in it


def execute(name: str, in_place: bool = False, **environment: str) -> Path:
    """Execute a notebook, with these variables in its environment. Returns the path of the executed copy."""
    import nbformat

    source = FOLDER / f"{name}.ipynb"
    target = source if in_place else ROOT / "results" / "notebooks" / source.name
    notebook = nbformat.read(source, as_version=4)
    with _as_in_a_kernel() as shell:
        os.environ.update(environment)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                _run(cell, shell, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)
    return target


def _run(cell: NotebookNode, shell: InteractiveShell, name: str) -> None:
    """Execute a cell and give it its outputs: what it printed, then what it displayed."""
    from nbformat.v4 import new_output

    printed = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    shell.display_pub.outputs.clear()
    with contextlib.redirect_stdout(printed["stdout"]), contextlib.redirect_stderr(printed["stderr"]):
        result = shell.run_cell(cell.source, store_history=True)
    if error := result.error_before_exec or result.error_in_exec:
        raise CdgrabError(f"notebook {name} failed: {type(error).__name__}: {error}") from error
    streams = {stream: text.getvalue() for stream, text in printed.items()}
    cell.outputs = [new_output("stream", name=stream, text=text) for stream, text in streams.items() if text]
    cell.outputs += [
        new_output("display_data", _with_palette(shown["data"]), metadata=shown["metadata"] or {})
        for shown in shell.display_pub.outputs
    ]
    cell.execution_count = result.execution_count
    cell.metadata.pop("execution", None)  # time stamps would make every execution a change


def _with_palette(data: dict) -> dict:
    """With a large picture in few colours instead of millions: a third of the size, and nobody sees it."""
    picture = base64.b64decode(data.get("image/png", ""))
    if len(picture) < LARGE:
        return data
    from PIL import Image

    written = io.BytesIO()
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(written, "png", optimize=True)
    return data | {"image/png": base64.b64encode(written.getvalue()).decode()}


@contextlib.contextmanager
def _as_in_a_kernel() -> Iterator[InteractiveShell]:
    """An empty namespace, in the folder of the checkout. What a notebook changes in this process is restored."""
    shell, settings, path = _shell(), dict(os.environ), list(sys.path)
    shell.reset(new_session=True)
    sys.path.insert(0, str(ROOT))
    try:
        with contextlib.chdir(ROOT):
            yield shell
    finally:
        sys.modules["matplotlib.pyplot"].close("all")
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(settings)


@cache
def _shell() -> InteractiveShell:
    """IPython that records what is displayed; figures are displayed as pictures."""
    from IPython.core.display_trap import DisplayTrap
    from IPython.core.displayhook import CapturingDisplayHook
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        def init_sys_modules(self) -> None:
            """This process keeps its own __main__."""

        def init_prompts(self) -> None:
            """Nor is it interactive: where it is, Lightning starts processes in another way."""

        def enable_gui(self, gui: str | None = None) -> None:
            """There is none."""

        def showtraceback(self, *arguments: object, **options: object) -> None:
            """`_run` raises the error."""

        showsyntaxerror = showtraceback

    shell = Shell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    shell.display_pub = CapturingDisplayPublisher()
    shell.display_trap = DisplayTrap(hook=CapturingDisplayHook(shell=shell, outputs=shell.display_pub.outputs))
    shell.enable_matplotlib("inline")
    return shell
