"""Execute notebooks of notebooks/ and keep the executed copies under results/notebooks.

python -m scripts.notebook fig3a_lr_hmda            # all data sources that have runs
python -m scripts.notebook --in-place               # all notebooks: refresh the committed outputs
"""

from __future__ import annotations

import sys

from experiments import screen  # before the imports that take seconds

if __name__ == "__main__":
    screen.begin()

from cdgrab.errors import CdgrabError
from experiments.report.notebook import FOLDER, execute
from scripts.arguments import Parser


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
            with screen.doing(f"executing {name}"):
                path = execute(name, arguments.in_place)
            print(path, flush=True)
        except CdgrabError as error:
            if "no finished runs" in str(error):
                print(f"skipped: {error}", flush=True)
            else:
                print(f"error: {error}", file=sys.stderr, flush=True)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
