"""Called by test_examples.py: recipes on one and on two processes, what each process returns there as JSON."""

import json
import os
import tempfile

import lightning
from forked import forked
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes
from torch.utils.data import Subset, default_collate
from transformers import TrainingArguments

from cdgrab import CdgrabError
from examples import ddp, ddp_sparsify, fsdp, plain, with_accelerate, with_lightning, with_trainer
from examples.digits import digits
from scripts.soak.processes import load_kernels

FEW = 256  # examples: 8 batches of 16 for each of two processes


def trained(recipe, folder, epochs="1", *checkpoints):
    settings = ("exdyna", "0.05") if recipe is ddp_sparsify else ("cd_grab",)
    found = recipe.main(*settings, epochs, *checkpoints)
    name = recipe.__name__.rpartition(".")[2]
    with open(f"{folder}/{name}-{os.environ.get('RANK', 'alone')}.json", "w") as file:
        json.dump(found, file)


def trained_alone(_, recipe, folder):
    trained(recipe, folder)


def train_again(kind, folder):
    """Each more than once, on few examples. Leaves the epoch and position of each training's sampler at its end."""
    found = {"trainer": trainer_again, "lightning": lightning_again, "lightning sharded": lightning_sharded}[kind]()
    with open(f"{folder}/{kind}, again-{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file)


def trainer_again():
    train, _ = digits()
    collate = lambda rows: dict(zip(("images", "labels"), default_collate(rows), strict=True))  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, num_train_epochs=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            per_device_train_batch_size=16, dataloader_pin_memory=False,
        )  # fmt: skip
        few = {"train_dataset": Subset(train, range(FEW)), "data_collator": collate}
        trainer, found = with_trainer.OrderedTrainer(with_trainer.Classifier(), settings, **few), []
        assert len(trainer.get_train_dataloader()) == FEW // 16 // 2
        for _ in range(2):
            trainer.train()
            found.append(where(trainer.sampler))
    return found


def lightning_again():
    model, found = with_lightning.Classifier("cd_grab"), []
    model.train_set = Subset(model.train_set, range(FEW))
    for settings in ({}, {"reload_dataloaders_every_n_epochs": 1}):
        lightning_trainer(**settings).fit(model)
        found.append(where(model.sampler))
    return found


class Sharded(with_lightning.Classifier):
    def configure_model(self):
        for part in (self.network[0], self.network):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


def lightning_sharded():
    found, model = [], Sharded("cd_grab")
    model.train_set = Subset(model.train_set, range(FEW))
    try:
        lightning_trainer(strategy=ModelParallelStrategy()).fit(model)
    except CdgrabError as error:
        found.append(str(error))
    model = Sharded("cd_grab")
    model.train_set = Subset(model.train_set, range(FEW))
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    lightning_trainer(strategy=strategy).fit(model)
    return [*found, where(model.sampler)]


def lightning_trainer(**settings):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    usual = {"max_epochs": 2, "accelerator": "cpu", "devices": 2, "use_distributed_sampler": False}
    return lightning.Trainer(**usual, **quiet, **settings)


def where(sampler):
    return sampler.sorter.epoch, sampler.sorter.position


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
    for kind in ("trainer", "lightning", "lightning sharded"):
        forked(2, train_again, kind, folder)
