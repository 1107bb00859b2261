"""Hugging Face Trainer: give it the loader, and attach the sampler when training begins.

python -m examples.with_trainer [cd_grab|d_rr|…] [epochs]               # or torchrun --nproc_per_node=2 -m …
"""

import sys
import tempfile

from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from cdgrab import OrderedBatchSampler
from examples.digits import accuracy, digits, network


class Classifier(nn.Module):
    """What Trainer expects: labels in, a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images, labels):
        return {"loss": nn.functional.cross_entropy(self.network(images), labels)}


class OrderedTrainer(Trainer):
    def get_train_dataloader(self) -> DataLoader:
        collate = lambda rows: dict(zip(("images", "labels"), default_collate(rows), strict=True))  # noqa: E731
        return DataLoader(self.train_dataset, batch_sampler=self.sampler, collate_fn=collate)


class Attach(TrainerCallback):
    def __init__(self, trainer: OrderedTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **rest):
        self.trainer.sampler.attach(self.trainer.model_wrapped)  # DDP's wrapper where there is one


def main(sorter: str = "cd_grab", epochs: str = "10") -> float:
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, num_train_epochs=int(epochs), learning_rate=2e-3, seed=0, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="epoch", disable_tqdm=True,
        )  # fmt: skip
        trainer = OrderedTrainer(Classifier(), settings, train_dataset=train)
        trainer.sampler = OrderedBatchSampler(train, batch_size=16, sorter=sorter, seed=0)
        trainer.add_callback(Attach(trainer))
        loss = trainer.train().training_loss
    print(f"mean loss {loss:.4f}, test accuracy {accuracy(trainer.model.network, test):.3f}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:])
