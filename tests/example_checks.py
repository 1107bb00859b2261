"""Run by test_examples.py: recipes on two processes, what each returns there as JSON."""

import json
import os
import sys

from forked import forked

from examples import ddp_sparsify, with_accelerate, with_lightning, with_trainer

PROCESSES = 2
RECIPES = {ddp_sparsify: ("exdyna", "0.05", "2")}
RECIPES |= dict.fromkeys((with_accelerate, with_trainer, with_lightning), ("cd_grab", "2"))


def trained(recipe, arguments, folder):
    found = recipe.main(*arguments)
    with open(f"{folder}/{recipe.__name__}-{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    for recipe, arguments in RECIPES.items():
        forked(PROCESSES, trained, recipe, arguments, sys.argv[1])
