"""Run under torchrun by the fixture `spawned`: one spawn serves all tests of several processes."""

import json
import sys

import dropin_checks
import exchange_checks
import sparsify_checks

from cdgrab.runtime import group as workers
from experiments.training.config import compose
from experiments.training.session import carry_out


def main(folder, runs):
    """The processes stay connected throughout: to connect anew they would meet at addresses that others have left."""
    for overrides in json.loads(runs):
        carry_out(compose(overrides))
    exchange_checks.main(f"{folder}/exchange")
    sparsify_checks.main(f"{folder}/sparsify")
    dropin_checks.main(f"{folder}/dropin")
    workers.disconnect()


if __name__ == "__main__":
    main(*sys.argv[1:])
