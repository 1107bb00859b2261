"""Lightning: sampler and loader are made when training starts, when the processes and DDP's wrapper are there.

python -m examples.with_lightning [cd_grab|d_rr|…] [epochs]             # or torchrun --nproc_per_node=2 -m …
"""

import os
import sys

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler
from examples.digits import accuracy, digits, network


class Classifier(lightning.LightningModule):
    def __init__(self, sorter: str) -> None:
        super().__init__()
        self.network, (self.train_set, self.test_set), self.sorter = network(), digits(), sorter
        self.sampler, self.observed, self.saved = None, [], None

    def training_step(self, batch, batch_index):
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        # DDP's wrapper where there is one; in a list, else Lightning would take it for a part of this module
        observed = [self.trainer.strategy.model, getattr(self.trainer.precision_plugin, "scaler", None)]
        if self.observed != observed:  # not so if only the loader is made anew
            if self.sampler:
                self.sampler.detach()
            self.sampler, self.observed = OrderedBatchSampler(self.train_set, 16, sorter=self.sorter, seed=0), observed
            self.sampler.attach(observed[0], scaler=observed[1])
        if self.saved:
            self.sampler.load_state_dict(self.saved)
            self.saved = None
        return DataLoader(self.train_set, batch_sampler=self.sampler, num_workers=2)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        if self.sampler:
            checkpoint["sampler"] = self.sampler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.saved = checkpoint.get("sampler")


def main(sorter: str = "cd_grab", epochs: str = "10") -> float:
    lightning.seed_everything(0, verbose=False)
    model = Classifier(sorter)
    settings = {"max_epochs": int(epochs), "accelerator": "cpu", "devices": int(os.environ.get("LOCAL_WORLD_SIZE", 1))}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(use_distributed_sampler=False, **settings, **quiet)
    trainer.fit(model)
    loss = float(trainer.callback_metrics["loss"])
    print(f"mean loss {loss:.4f}, test accuracy {accuracy(model.network, model.test_set):.3f}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:])
