"""Download a task's dataset into CDGRAB_DATA, or ./data when that is not set. Files are checked and written whole.

python -m scripts.get_data lr-hmda        # `make data-lr-hmda`
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from cdgrab.data import cifar10, hmda, m4, wikitext
from cdgrab.errors import CdgrabError

DOWNLOADS = {
    "lr-hmda": hmda.download,
    "lstm-wiki2": wikitext.download,
    "mlp-m4": m4.download,
    "cifar10": cifar10.download,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help=f"one of {', '.join(DOWNLOADS)}")
    task = parser.parse_args().task.lower().replace("_", "-")
    root = Path(os.environ.get("CDGRAB_DATA") or "data").expanduser()
    try:
        if task not in DOWNLOADS:
            raise CdgrabError(f"unknown task {task!r}; the tasks are {', '.join(DOWNLOADS)}")
        for path in DOWNLOADS[task](root):
            print(path)
    except CdgrabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
