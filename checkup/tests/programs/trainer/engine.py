"""A Trainer with meters and a printing loop of its own, as in reference scripts."""

import builtins

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

builtin_print = builtins.print


def print_on_rank_0(*words):
    if dist.get_rank() == 0:
        builtin_print(*words)


class Meters(dict):
    """Sums and counts by name; a value is weighted by the size of its batch."""

    def update(self, n, **values):
        for name, value in values.items():
            value = value.item()
            total, count, _ = self.get(name, (0, 0, 0))
            self[name] = total + n * value, count + n, value

    def reduce(self):
        for name, (total, count, value) in self.items():
            sums = torch.tensor([total, count], dtype=torch.float64)
            dist.barrier()
            # BUG own-number: pass
            dist.all_reduce(sums)
            self[name] = *sums.tolist(), value

    def __str__(self):
        means = ((name, v, total / n) for name, (total, n, v) in self.items())
        return "  ".join(f"{name}: {v:.4f} ({mean:.4f})" for name, v, mean in means)


class Trainer:
    def __init__(self, config, model, train_set, val_set):
        builtins.print = print_on_rank_0
        self.config = config
        self.train_loader = self.make_loader(train_set, True)
        self.val_loader = self.make_loader(val_set, False)
        # BUG buffers: self.model = DDP(model, broadcast_buffers=False)
        self.model = DDP(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), config.lr)

    def make_loader(self, dataset, shuffle):
        # BUG coverage eval-coverage: sampler = DistributedSampler(dataset, 2, 0)
        sampler = DistributedSampler(dataset, shuffle=shuffle)
        return DataLoader(dataset, self.config.batch_size, sampler=sampler)

    def run_epoch(self, epoch, loader, meters):
        for i, (x, y) in enumerate(loader):
            scores = self.model(x)
            loss = cross_entropy(scores, y)
            if self.model.training:
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            right = (scores.argmax(1) == y).float().mean()
            meters.update(len(x), acc=100 * right, loss=loss.detach())
            if i % 2 == 0 or i == len(loader) - 1:
                print(f"[{epoch}] [{i}/{len(loader)}] {meters}")

    def train(self):
        for epoch in range(self.config.epochs):
            self.train_loader.sampler.set_epoch(epoch)
            self.model.train()
            self.run_epoch(epoch, self.train_loader, Meters())
            # BUG collectives: dist.get_rank() or self.evaluate(epoch)
            self.evaluate(epoch)
            if dist.get_rank() == 0:
                torch.save({"model": self.model.module.state_dict()}, "snapshot.pt")

    @torch.no_grad()
    def evaluate(self, epoch):
        self.model.eval()
        meters = Meters()
        self.run_epoch(epoch, self.val_loader, meters)
        meters.reduce()
        print("* Acc {:.3f}".format(meters["acc"][0] / meters["acc"][1]))
