"""Lightning: the loader has the sampler, which is attached when training starts.

python -m examples.with_lightning [cd_grab|d_rr|…] [epochs]
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from cdgrab import OrderedBatchSampler

from .digits import accuracy, digits, network


class Classifier(lightning.LightningModule):
    def __init__(self, sampler: OrderedBatchSampler) -> None:
        super().__init__()
        self.network, self.sampler = network(), sampler

    def training_step(self, batch, batch_index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_start(self) -> None:
        self.sampler.attach(self.trainer.strategy.model)  # DDP's wrapper where there is one

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["sampler"] = self.sampler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.sampler.load_state_dict(checkpoint["sampler"])


def main(sorter: str = "cd_grab", epochs: str = "10") -> float:
    lightning.seed_everything(0, verbose=False)
    train, test = digits()
    sampler = OrderedBatchSampler(train, batch_size=16, sorter=sorter, seed=0)
    model = Classifier(sampler)
    trainer = lightning.Trainer(
        max_epochs=int(epochs), accelerator="cpu", use_distributed_sampler=False, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(train, batch_sampler=sampler))
    loss = float(trainer.callback_metrics["loss"])
    print(f"mean loss {loss:.4f}, test accuracy {accuracy(model.network, test):.3f}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:])
