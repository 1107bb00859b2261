"""Several runs in one process group, started by torchrun from test_processes.py: one spawn serves all checks."""

import json
import sys

from cdgrab import workers
from cdgrab.config import compose
from experiments.train import train

if __name__ == "__main__":
    for overrides in json.loads(sys.argv[1]):
        train(compose(overrides))
    workers.disconnect()
