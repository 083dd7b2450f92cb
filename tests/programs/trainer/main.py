"""Starts the trainer: python -m trainer.main lr=0.1"""

import logging
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from trainer.engine import Trainer


config = SimpleNamespace(lr=0.05, batch_size=8, epochs=3)


def main():
    logging.basicConfig(level=logging.INFO, format="[%(levelname)s] %(message)s")
    config.lr = float(sys.argv[1].removeprefix("lr="))
    dist.init_process_group(backend="gloo")
    torch.manual_seed(42)
    images = torch.randn(160, 8)
    labels = (images.sum(1) > 0).long()
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
    )
    torch.manual_seed(42 + dist.get_rank())
    train_set = TensorDataset(images[:96], labels[:96])
    val_set = TensorDataset(images[96:], labels[96:])
    Trainer(config, model, train_set, val_set).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
