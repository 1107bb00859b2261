"""Hugging Face Trainer: `OrderedTrainer` in the place of Trainer, in any script, with gradient accumulation too.

python -m examples.with_trainer [cd_grab|d_rr|…] [epochs]               # or torchrun --nproc_per_node=2 -m …
"""

import sys
import tempfile

sys.path += [] if __package__ else [f"{sys.path[0]}/.."]  # the root of the clone

from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import Trainer, TrainerCallback, TrainingArguments

from cdgrab import OrderedBatchSampler
from examples.digits import accuracy, digits, network


class OrderedTrainer(Trainer):
    sorter, sampler, observed, made_for = "cd_grab", None, None, None

    def get_train_dataloader(self) -> DataLoader:
        loader, args = super().get_train_dataloader(), self.args  # it removes columns
        wanted = (self.train_dataset, self._train_batch_size, args.gradient_accumulation_steps)
        if self.sampler is None:
            self.add_callback(begin := TrainerCallback())
            begin.on_train_begin = self.attach_sampler
        if self.observed is not self.model_wrapped or self.made_for != wanted:  # else it trains once more
            if self.observed is not None:
                self.sampler.detach()
            units = {"accumulation_steps": wanted[2], "drop_last": wanted[2] > 1 or args.dataloader_drop_last}
            self.sampler = OrderedBatchSampler(loader.dataset, wanted[1], sorter=self.sorter, seed=args.seed, **units)
            self.observed, self.made_for = None, wanted
        names = ["collate_fn", "num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "worker_init_fn"]
        same = {name: getattr(loader, name) for name in [*names, "multiprocessing_context"]}
        return DataLoader(loader.dataset, batch_sampler=self.sampler, **same)

    def attach_sampler(self, *_, **__) -> None:
        if self.observed is None:
            self.observed = self.model_wrapped  # DDP's wrapper where there is one
            self.sampler.attach(self.observed, scaler=self.accelerator.scaler)


class Classifier(nn.Module):  # labels in, a loss out, as Trainer expects
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, images, labels):
        return {"loss": nn.functional.cross_entropy(self.network(images), labels)}


def main(sorter: str = "cd_grab", epochs: str = "10") -> float:
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, num_train_epochs=int(epochs), learning_rate=2e-3, seed=0, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="epoch", disable_tqdm=True, per_device_train_batch_size=16,
        )  # fmt: skip
        collate = lambda rows: dict(zip(("images", "labels"), default_collate(rows), strict=True))  # noqa: E731
        trainer = OrderedTrainer(Classifier(), settings, train_dataset=train, data_collator=collate)
        trainer.sorter = sorter
        loss = trainer.train().training_loss
    print(f"mean loss {loss:.4f}, test accuracy {accuracy(trainer.model.network, test):.3f}")
    return loss


if __name__ == "__main__":
    main(*sys.argv[1:])
