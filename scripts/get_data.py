"""Download a task's dataset into CDGRAB_DATA, or ./data when that is not set.

    python -m scripts.get_data cifar10                       # `make data-cifar10`
    python -m scripts.get_data glue --clones my/clones       # from clones of the hub's repositories, without a network

Every dataset has one or more origins, tried in turn. Files are checked (size and checksum, or number of rows) and
written whole; files that are there and right are kept, and nothing wrong or half-written is left behind.

  lr-hmda        hmda/                  the repository of arXiv 2301.11562
  lstm-wiki2     wikitext-2/            PyTorch's examples; the hub's Salesforce/wikitext
  mlp-m4         m4/                    the competition's repository
  cifar10        cifar-10-batches-py/   the author's site; torchvision, where installed
                 cifar-10-batches-bin/  the hub's uoft-cs/cifar10 (the same pictures in the binary layout)
  gpt2-wiki103   wikitext-103/          the hub's Salesforce/wikitext
                 gpt2/                  the hub's openai-community/gpt2; OpenAI's site
  glue           glue/<TASK>/           the hub's nyu-mll/glue

The hub is https://huggingface.co, or what HF_ENDPOINT names. Its libraries keep what they download under HF_HOME; with
HF_HUB_OFFLINE=1 that is used alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cdgrab.checks import look_up
from cdgrab.errors import CdgrabError
from experiments.data import cifar10, hmda, hub, hub_glue, m4, wikitext
from experiments.early import exit_status
from scripts.arguments import Parser


@dataclass(frozen=True)
class FromHub:
    """An origin that reads a repository of the hub, or a clone of it."""

    repository: str
    write: Callable[..., list[Path]]

    def __call__(self, root: Path) -> list[Path]:
        return self.write(root, repository=self.repository)

    def cloned_in(self, clones: Path) -> FromHub:
        if not (clone := clones / self.repository).is_dir():
            raise CdgrabError(f"there is no clone of {self.repository} at {clone}")
        return replace(self, repository=str(clone))


Origin = Callable[[Path], list[Path]]
# task -> its datasets -> the origins of each, in the order in which they are tried
DATASETS: dict[str, list[list[Origin]]] = {
    "lr-hmda": [[hmda.download]],
    "lstm-wiki2": [[wikitext.download, FromHub(hub.WIKITEXT, hub.wikitext2)]],
    "mlp-m4": [[m4.download]],
    "cifar10": [[cifar10.download, cifar10.download_with_torchvision, FromHub(hub.CIFAR10, hub.cifar10_pictures)]],
    "gpt2-wiki103": [[FromHub(hub.GPT2, hub.gpt2), hub.gpt2_from_openai], [FromHub(hub.WIKITEXT, hub.wikitext103)]],
    "glue": [[FromHub(hub_glue.GLUE, partial(hub_glue.glue, dataset=name))] for name in hub_glue.TABLES],
}


def main(command_line: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("task", help=f"one of {', '.join(DATASETS)}")
    clones = "a folder with clones of the hub's repositories under their names (CLONES/nyu-mll/glue), used instead"
    parser.add_argument("--clones", type=Path, help=clones)
    arguments = parser.parse_args(command_line)
    task = arguments.task.lower().replace("_", "-")
    return exit_status(lambda: get_all(task, arguments.clones), "interrupted; what was complete is kept")


def get_all(task: str, clones: Path | None) -> None:
    root = Path(os.environ.get("CDGRAB_DATA") or "data").expanduser()
    for origins in look_up("task", task, DATASETS):
        for path in get(root, cloned(origins, clones) if clones else origins):
            print(path)


def cloned(origins: list[Origin], clones: Path) -> list[Origin]:
    """Those of the origins that are on the hub, as clones."""
    found = [origin.cloned_in(clones) for origin in origins if isinstance(origin, FromHub)]
    if not found:
        raise CdgrabError("this dataset is not on the hub, so that --clones does not help")
    return found


def get(root: Path, origins: list[Origin]) -> list[Path]:
    """The files of the first origin that can give them."""
    *first, last = origins
    for origin in first:
        try:
            return origin(root)
        except CdgrabError as error:
            print(f"{error}; trying the next origin", file=sys.stderr)
    return last(root)


if __name__ == "__main__":
    sys.exit(main())
