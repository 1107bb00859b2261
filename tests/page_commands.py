"""Commands that stand on pages, carried out up to the moment at which their work would begin: make's targets and
variables, arguments and settings are checked by the programs themselves."""

import importlib
import inspect
import runpy
import shlex
import subprocess
import sys
import tomllib
from contextlib import ExitStack, chdir, contextmanager
from functools import cache
from unittest import mock

from torch.distributed.run import parse_args

from cdgrab.sorters import SORTERS
from cdgrab.sparsify import SPARSIFIERS
from experiments.store.files import ROOT
from experiments.studies.base import Study
from experiments.tasks import TASKS
from experiments.training import extensions
from experiments.training.extensions import VARIABLE

CLONE = "/path/to/this/clone"
BEGINNINGS = {  # by command: the functions that do its work
    "experiments.launch": ("experiments.launch.launch_all", "experiments.training.jobs.launch_at_once"),
    "experiments.train": ("experiments.training.session.carry_out",),
    "experiments.study": ("experiments.study.carry_out",),
    "scripts.reproduce": ("experiments.launch.launch_all", "experiments.training.jobs.launch_at_once"),
    "scripts.get_data": ("scripts.get_data.get",),
    "scripts.report": ("scripts.report.write",),
    "scripts.check_results": ("scripts.check_results.check",),
    "scripts.notebook": ("scripts.notebook.execute",),
    "scripts.bench.__main__": ("scripts.bench.__main__.run",),
    "scripts.soak.__main__": ("scripts.soak.__main__.load_kernels",),
    "scripts.fuzz.__main__": ("scripts.fuzz.__main__.portions",),
    "scripts.walk": ("scripts.walk.two_steps",),
}


class Refused(Exception):
    pass


class Begins(BaseException):
    """Everything has been understood. Not an Exception, which commands make a sentence of."""


def carry_out(command, environment=()):
    """Refused says what is wrong with the command."""
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        _make(arguments)
    elif program == "python":
        module = arguments[0] == "-m"
        _python(arguments[module], arguments[module + 1 :], module, environment)
    elif program == "torchrun":
        try:
            parsed = parse_args(arguments)
        except SystemExit as error:
            raise Refused(command) from error
        _python(parsed.training_script, parsed.training_script_args, parsed.module, environment)
    elif program == "pip":
        _pip(arguments)
    else:
        raise Refused(f"nobody knows whether this is right: {command}")


def _make(arguments):
    """The commands that make would start. A variable counts that changes them, or that they read themselves."""
    lines = _started(*arguments)
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    for name in given.keys() - {VARIABLE}:
        if _started(*(word for word in arguments if not word.startswith(f"{name}="))) == lines:
            raise Refused(f"{name} changes nothing of make {' '.join(arguments)}")
    for line in lines:
        for part in line.split(" && "):
            if part.startswith(".venv/bin/python -m ") and part.split()[2] not in ("pip", "pytest", "hatchling"):
                carry_out(part.removeprefix(".venv/bin/"), given.items())


@cache
def _started(*arguments):
    """As if .venv were there."""
    command = ["make", "--dry-run", "--assume-old=.venv/.ready", *arguments]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        raise Refused(made.stderr)
    return made.stdout.splitlines()


def _python(name, arguments, module, environment):
    recipe = name.removeprefix("examples.") if module else name.removeprefix("examples/").removesuffix(".py")
    if name.startswith("examples") and "/" not in recipe:  # the tests of recipes run them
        try:
            inspect.signature(importlib.import_module(f"examples.{recipe}").main).bind(*arguments)
        except (ImportError, TypeError) as error:
            raise Refused(name) from error
        return
    if module:
        known = next((known for known in (name, f"{name}.__main__") if known in BEGINNINGS), None)
        if known is None:
            raise Refused(f"{name} is no command")
        begin = importlib.import_module(known).main
    else:
        known, begin = "experiments.launch", lambda: runpy.run_path(str(ROOT / name), run_name="__main__")
    with _stopped_at_the_beginning(known), mock.patch.dict("os.environ", environment), chdir(ROOT):
        try:
            with mock.patch.object(sys, "argv", [name, *arguments]):
                status = begin()
        except Begins:
            return
        except (SystemExit, OSError) as error:  # of arguments; of a file
            status = error
    raise Refused(f"{name} {' '.join(arguments)} ends with {status}")


@contextmanager
def _stopped_at_the_beginning(command):
    """And names that a file registers are forgotten, with the file."""
    with ExitStack() as stack:
        stack.callback(extensions._load.cache_clear)
        for registry in (SORTERS, SPARSIFIERS, TASKS):
            stack.enter_context(mock.patch.dict(registry))
        for function in BEGINNINGS[command]:
            stack.enter_context(mock.patch(function, side_effect=_begins))
        yield


def _begins(*arguments, **options):
    for study in (argument for argument in arguments if isinstance(argument, Study)):
        study.parts()  # reads its settings
    raise Begins


def _pip(arguments):
    from pip._internal.commands import create_command  # takes a second
    from pip._internal.req.constructors import install_req_from_line

    try:
        options, words = create_command(arguments[0]).parse_args(arguments[1:])
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for word in words:
            wanted = install_req_from_line(word.replace(CLONE, str(ROOT)).replace(".[", f"{ROOT}["))
            if unknown := wanted.extras - extras.keys():
                raise Refused(f"there is no extra {unknown}")
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # pip has errors of many kinds
        raise Refused(f"pip {' '.join(arguments)}") from error
