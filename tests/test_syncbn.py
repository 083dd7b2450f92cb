"""SyncBatchNorm: processes with parts of a batch do what one does with the whole."""

import os

import pytest
import torch
import torch.distributed as dist
from conftest import copy_room, load, run
from ranks import Run
from test_cinic import CPU, QUICK, check
from torch import nn
from torch.nn import functional as F

CUDA = torch.device("cuda")  # no GPU is needed to name it


def batches(channels=6):
    """Two batches (10, C, 5, 4) with a large mean, and gradients for them.

    A variance below 1 beside a mean of 100 loses its digits if it is calculated as
    mean(x * x) - mean * mean.
    """
    torch.manual_seed(0)
    offset = torch.linspace(-100, 100, channels).view(-1, 1, 1)
    x = torch.randn(2, 10, channels, 5, 4) * torch.rand(channels, 1, 1) * 3 + offset
    return x, torch.randn(2, 10, channels, 5, 4)


def step_by_step(layer, x, gradients, dtype=torch.float32):
    """Return what a layer makes of its part of both batches."""
    torch.manual_seed(1)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    seen = {"y": [], "x.grad": []}
    for batch, gradient in zip(x, gradients, strict=True):
        batch = batch.to(dtype, memory_format=torch.channels_last).requires_grad_()
        with torch.autocast("cpu", enabled=dtype != torch.float32):
            y = layer(batch)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last)
        (y * gradient).sum().backward()
        seen["y"].append(y.detach())
        seen["x.grad"].append(batch.grad)
    seen |= {"weight": layer.weight.grad, "bias": layer.bias.grad}
    seen["evaluated"] = layer.eval()(x[0]).detach()
    return seen | buffers(layer)


def buffers(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


class Parts:
    """Let a process normalise its part of the batches, and save what it saw."""

    def __init__(self, sizes, dtype):
        self.sizes, self.dtype = sizes, dtype

    def __call__(self, module, rank):
        def main():
            dist.init_process_group()
            layer = module.sync_batchnorm(nn.BatchNorm2d(6, momentum=0.3), CPU)
            x, gradients = (t.split(self.sizes, 1)[rank] for t in batches())
            torch.save(step_by_step(layer, x, gradients, self.dtype), f"{rank}.pt")
            dist.destroy_process_group()

        module.main = main


def started(folder, script, *options, ranks, patch, datadir=""):
    """Run a script's main(), patched; return what each rank saved."""
    process = Run(folder, datadir, script, *options, ranks=ranks, patch=patch)
    assert process.join() == [0] * ranks, process.output()
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize("sizes", [(10,), (5, 5), (3, 7), (1, 2, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_a_batch_are_normalised_like_the_whole(sizes, dtype, tmp_path):
    parts = started(
        tmp_path, "cinic_syncbn.py", ranks=len(sizes), patch=Parts(sizes, dtype)
    )
    whole = step_by_step(nn.BatchNorm2d(6, momentum=0.3), *batches(), dtype)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (0.016, 1e-3)
    for step in (0, 1):
        for name in ("y", "x.grad"):
            joined = torch.cat([part[name][step] for part in parts])
            torch.testing.assert_close(
                joined, whole[name][step], rtol=rtol, atol=atol
            )
    for name in ("weight", "bias"):
        summed = sum(part[name] for part in parts)
        torch.testing.assert_close(summed, whole[name], rtol=1e-4, atol=100 * atol)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for part in parts:
            assert torch.equal(part[name], parts[0][name])
            torch.testing.assert_close(part[name], whole[name], rtol=1e-5, atol=1e-5)
    joined = torch.cat([part["evaluated"] for part in parts])
    torch.testing.assert_close(joined, whole["evaluated"], rtol=1e-5, atol=1e-3)


def step_on_a_part(module, rank):
    """A step on a batch of 10, of which each of two processes has 5."""

    def main():
        ranks = int(os.environ["WORLD_SIZE"])
        dist.init_process_group()
        torch.manual_seed(0)
        model = module.Classifier("resnet18").to(memory_format=torch.channels_last)
        model.amp = "cpu", None, False
        before = {k: v.clone() for k, v in model.state_dict().items()}
        if ranks > 1:
            model = module.sync_batchnorm(model, CPU)
        wrapped = nn.parallel.DistributedDataParallel(model)
        images = torch.randint(0, 256, (10, 3, 64, 64), dtype=torch.uint8)
        labels = torch.randint(0, 10, (10,))
        mine = slice(rank * 10 // ranks, (rank + 1) * 10 // ranks)
        F.cross_entropy(wrapped(images[mine]), labels[mine]).backward()
        torch.optim.SGD(model.parameters(), 0.01).step()
        after = model.state_dict()
        torch.save({k: (after[k] - before[k]).float() for k in after}, f"{rank}.pt")
        dist.destroy_process_group()

    module.main = main


def test_two_halves_of_a_batch_train_like_the_whole(tmp_path):
    """A whole ResNet, in training mode, wrapped by DDP."""
    changes = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        how = {"ranks": ranks, "patch": step_on_a_part}
        changes += started(folder, "cinic_syncbn.py", **how)
    whole, half, other = changes
    for name, change in whole.items():
        assert torch.equal(half[name], other[name])
        # A rounding error can put a ReLU's input on the other side of 0.
        assert (half[name] - change).norm() < 0.02 * change.norm(), name


def note_buffers(module, rank):
    """Make main() save a rank's buffers when it has trained for an epoch."""
    train = module.train

    def noting_train(args, model, *more):
        train(args, model, *more)
        torch.save(buffers(model.module), f"{rank}.pt")

    module.train = noting_train


@pytest.mark.parametrize("script", ["cinic_ddp.py", "cinic_syncbn.py"])
def test_whose_images_the_running_means_are_of(script, sample, tmp_path):
    options = *QUICK, "--epochs", 1
    first, second = started(
        tmp_path, script, *options, ranks=2, patch=note_buffers, datadir=sample
    )
    means = [name for name in first if name.endswith("running_mean")]
    assert len(means) == 20  # of resnet18
    equal = [torch.equal(first[name], second[name]) for name in means]
    assert {*equal} == {script == "cinic_syncbn.py"}


def test_a_run(sample, tmp_path):
    room = copy_room("cinic_lab", tmp_path)
    done = run(["bash", "run-2gpus.sh", "cinic_syncbn.py", *QUICK], room, sample)
    check(done, room, 2, 3)


def test_one_process_has_batchnorm():
    """Without a process group, as in a notebook: the same to the bit."""
    torch.manual_seed(0)
    layer = load("cinic_lab", "syncbn").sync_batchnorm(nn.BatchNorm2d(6), CPU)
    assert type(layer) is not nn.BatchNorm2d
    by_hand, plain = (
        step_by_step(n, *batches()) for n in (layer, nn.BatchNorm2d(6))
    )
    for name, values in plain.items():
        torch.testing.assert_close(by_hand[name], values, rtol=0, atol=0)


@pytest.mark.parametrize("device", [CUDA, CPU], ids=str)
def test_every_batchnorm_is_converted(device):
    syncbn, cinic_ddp = (load("cinic_lab", name) for name in ("syncbn", "cinic_ddp"))
    model = cinic_ddp.Classifier("resnet18")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = syncbn.sync_batchnorm(model, device)
    expected = nn.SyncBatchNorm if device == CUDA else syncbn.SyncBatchNorm2d
    names = [type(layer) for layer in converted.modules()]
    assert names.count(expected) == 20 and nn.BatchNorm2d not in names
    after = converted.state_dict()
    assert [*after] == [*before]  # so any script can resume from the checkpoint
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert type(converted) is cinic_ddp.Classifier  # which autocast is set on
