"""Run under torchrun by the fixture `spawned`: one spawn serves all tests of several processes."""

import json
import sys

import dropin_checks
import exchange_checks
import sparsify_checks

from cdgrab import workers
from cdgrab.config import compose
from experiments.train import train


def main(folder, runs):
    for overrides in json.loads(runs):
        train(compose(overrides))
    workers.disconnect()
    exchange_checks.main(f"{folder}/exchange")
    sparsify_checks.main(f"{folder}/sparsify")
    dropin_checks.main(f"{folder}/dropin")


if __name__ == "__main__":
    main(*sys.argv[1:])
