"""A recorder of a training script's steps in one rank, without randomness.

For Run(patch=record) of run_ranks.py. Two runs of the same steps have the same
numbers then, on any number of ranks.
"""

import io
import os
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizers
from torch.utils.data import DistributedSampler

from common.data import InMemoryDataset

DATA = {"dogs_vs_cats", "mnist", "cifar100", "cinic"}
SIZES = 36, 20, 36  # to train on in batches of 12; to evaluate, not divisible by 3


class OneReplica(DistributedSampler):
    """A sampler that gives one process the shards of all ranks."""

    def __init__(self, dataset):
        super().__init__(dataset, 1, 0)
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return super().__iter__()


class Momentum(torch.optim.SGD):
    """SGD with momentum, whose steps differ for summed and averaged gradients."""

    def __init__(self, params, lr, foreach=None, fused=None):
        super().__init__(params, lr, momentum=0.9, foreach=foreach)


class FixedBatchNorm(nn.BatchNorm2d):
    """BatchNorm that stays in evaluation mode: ranks would have other statistics."""

    def __init__(self, *args):
        super().__init__(*args)
        self.running_var.fill_(4)  # or the scores are huge

    def train(self, mode=True):
        return super().train(False)


def load_fewer(load):
    """Return the data sets that a function loads, shortened to SIZES."""
    sets = zip(load(), SIZES, strict=False)
    return [InMemoryDataset(s.images[:size], s.labels[:size]) for s, size in sets]


def local_copies(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    return [shard.detach().contiguous().clone() for shard in shards]


def record(module, rank, *, batchnorm=FixedBatchNorm):
    """Make main() save what it computes to RANK.pt.

    means: loss and accuracies, as printed, and how many samples were evaluated;
    start, weights: of this rank, before the first step and after the last.
    """
    seen = {"means": []}
    nn.Dropout.forward = lambda layer, x: x
    nn.BatchNorm2d = batchnorm
    for name in vars(module).keys() & {"augment", "crop_and_flip"}:
        setattr(module, name, lambda images: images.flip(3))
    for name in vars(module).keys() & DATA:
        setattr(module, name, partial(load_fewer, getattr(module, name)))
    torch.utils.data.RandomSampler = module.RandomSampler = OneReplica
    for name in ("Adam", "Adadelta", "RMSprop"):
        setattr(torch.optim, name, Momentum)
    for name in getattr(module, "OPTIMIZERS", {}):  # MNIST's
        module.OPTIMIZERS[name] = Momentum
    torch.accelerator.device_count = lambda: 2  # for DataParallel

    def note_weights(optimizer, *_):
        seen["weights"] = local_copies(optimizer)
        seen.setdefault("start", seen["weights"])

    optimizers.register_optimizer_step_pre_hook(note_weights)
    optimizers.register_optimizer_step_post_hook(note_weights)
    get_device, main = module.get_device, module.main

    def check_device(local_rank=None):
        assert local_rank is None or local_rank == int(os.environ["LOCAL_RANK"])
        torch.accelerator.device_count = lambda: 0
        return get_device(local_rank)

    def check_save(content, file, *args, **options):
        is_sent = isinstance(file, io.BytesIO)  # to other ranks
        shards = module.__name__ == "fsdp_checkpoint"
        assert rank == 0 or is_sent or shards, "only rank 0 writes"
        save(content, file, *args, **options)

    def recording_metrics(sums, *names, **options):
        means = to_metrics(sums, *names, **options)
        evaluated = {} if torch.is_grad_enabled() else {"count": sums[-1].item()}
        seen["means"].append(means | evaluated)
        return means

    def evaluate_after_other_images(model, *args):
        for buffer in model.buffers():  # of BatchNorm
            buffer += rank
        return evaluate(model, *args)

    def recording_main():
        main()
        save(seen, f"{rank}.pt")

    save, torch.save = torch.save, check_save
    if hasattr(module, "to_metrics"):
        to_metrics, module.to_metrics = module.to_metrics, recording_metrics
    if hasattr(module, "evaluate"):
        evaluate, module.evaluate = module.evaluate, evaluate_after_other_images
    module.get_device, module.main = check_device, recording_main
