"""Hugging Face's Trainer."""

import os

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 101

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "labels": (x.sum() > 0).long()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 2)
        self.layers = nn.Sequential(*layers)

    def forward(self, x, labels):
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class Seeds(TrainerCallback):
    """Seeds each rank for itself once the Trainer has seeded all alike."""

    def on_train_begin(self, args, state, control, **kwargs):
        # BUG seeds: set_seed(args.seed)
        set_seed(args.seed + args.process_index)


def main():
    set_seed(0)
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 8}
    options |= {"use_cpu": True}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    options |= {"eval_strategy": "epoch", "logging_steps": 3}
    arguments = TrainingArguments("out", **options)
    data = {"train_dataset": Samples(), "eval_dataset": Samples()}
    trainer = Trainer(Model(), arguments, **data, callbacks=[Seeds()])
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), os.path.join("out", "final.pt"))


if __name__ == "__main__":
    main()
