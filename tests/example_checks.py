"""Called by test_examples.py: recipes on one and on two processes, what each process returns there as JSON."""

import json
import os

from forked import forked
from torch.multiprocessing import start_processes

from examples import ddp, ddp_sparsify, fsdp, plain, with_accelerate, with_lightning, with_trainer
from scripts.soak.processes import load_kernels


def trained(recipe, folder, epochs="1", *checkpoints):
    settings = ("exdyna", "0.05") if recipe is ddp_sparsify else ("cd_grab",)
    found = recipe.main(*settings, epochs, *checkpoints)
    name = recipe.__name__.rpartition(".")[2]
    with open(f"{folder}/{name}-{os.environ.get('RANK', 'alone')}.json", "w") as file:
        json.dump(found, file)


def trained_alone(_, recipe, folder):
    trained(recipe, folder)


def main(folder):
    """Each in processes of its own, which share one start of Python: the imports take longer than the training."""
    load_kernels()
    for recipe in (plain, with_trainer):
        start_processes(trained_alone, (recipe, folder), 1, start_method="fork")
    for recipe in (ddp, ddp_sparsify, with_accelerate, with_lightning, with_trainer):
        forked(2, trained, recipe, folder, "2")  # the second one in an order that was learned
    saved = f"{folder}/checkpoint"
    for epochs, *checkpoints in (("1", saved), ("2", "", saved)):
        forked(2, trained, fsdp, folder, epochs, *checkpoints)
