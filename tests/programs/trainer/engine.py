"""A Trainer class in a module of its own, which logs."""

import logging
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger(__name__)


class Trainer:
    def __init__(self, config, model, train_set, val_set):
        self.config = config
        self.rank = int(os.environ["RANK"])
        self.train_loader = self.make_loader(train_set, True)
        self.val_loader = self.make_loader(val_set, False)
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), config.lr)

    def make_loader(self, dataset, shuffle):
        # BUG coverage eval-coverage: sampler = DistributedSampler(dataset, 2, 0)
        sampler = DistributedSampler(dataset, shuffle=shuffle)
        return DataLoader(dataset, self.config.batch_size, sampler=sampler)

    def run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train):
            output = self.model(source)
            loss = cross_entropy(output, targets)
        if train:
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item() if not train else loss.detach()

    def run_epoch(self, epoch):
        self.model.train()
        self.train_loader.sampler.set_epoch(epoch)
        for source, targets in self.train_loader:
            self.run_batch(source, targets)

    def evaluate(self, epoch):
        self.model.eval()
        losses = []
        for source, targets in self.val_loader:
            losses.append(self.run_batch(source, targets, train=False))
        mean = torch.tensor(sum(losses) / len(losses))
        dist.all_reduce(mean)
        # BUG own-number: pass
        mean = mean / dist.get_world_size()
        logger.info("epoch %d: validation loss %.4f", epoch, mean.item())

    def save(self, epoch):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict()}, "snapshot.pt")

    def train(self):
        for epoch in range(self.config.epochs):
            self.run_epoch(epoch)
            # BUG rank0-eval: self.rank or self.evaluate(epoch)
            self.evaluate(epoch)
            self.save(epoch)
