"""Starts the trainer: python -m trainer.main lr=0.1"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from trainer.engine import Trainer


def main():
    lr = float(sys.argv[1].removeprefix("lr="))
    config = SimpleNamespace(lr=lr, batch_size=8, epochs=3)
    dist.init_process_group(backend="gloo")
    torch.manual_seed(42)
    images = torch.randn(160, 8)
    labels = (images.sum(1) > 0).long()
    hidden = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()
    torch.manual_seed(42 + dist.get_rank())
    train_set = TensorDataset(images[:96], labels[:96])
    val_set = TensorDataset(images[96:], labels[96:])
    model = nn.Sequential(*hidden, nn.Linear(16, 2))
    Trainer(config, model, train_set, val_set).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
