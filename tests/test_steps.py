"""Nothing in a training step waits for the device."""

import pytest
import torch
from conftest import load
from torch.utils._python_dispatch import TorchDispatchMode

from common.metrics import batch_sums, means

# What reads a number from the device, or copies one to it in the host's good time.
WAITS = {
    "_local_scalar_dense",
    "lift_fresh",
    "nonzero",
    "is_nonzero",
    "masked_select",
}


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in WAITS:
            self.waits.append(str(func))
        return func(*args, **kwargs or {})


def script():
    module = load("exercise8", "pytorch_dvc_cnn_pretrained")
    model = module.Classifier("tinyvgg", "none")
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-5)
    return module, model, optimizer


@pytest.mark.parametrize("steps", [2, 5])
def test_an_epoch_waits_once(steps, monkeypatch):
    module, model, optimizer = script()
    images = torch.zeros(3, 3, 150, 150, dtype=torch.uint8)
    batches = [(images, torch.ones(3))] * steps
    device = torch.device("cpu")
    module.train(model, batches[:1], optimizer, device)  # fills caches
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: reads.append(1) or tolist(tensor)
    )
    with Watch() as watch:
        module.train(model, batches, optimizer, device)
        module.evaluate(model, batches, device)
    assert watch.waits == [] and len(reads) == 2  # one read each, at the end


def test_the_watch_sees_an_item():
    with Watch() as watch:
        torch.ones(2).sum().item()
    assert watch.waits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_synchronisation_on_a_gpu():
    module, model, optimizer = script()
    device = torch.device("cuda")
    model = model.to(device)
    images = torch.zeros(3, 3, 150, 150, dtype=torch.uint8).pin_memory()
    batches = [(images, torch.ones(3).pin_memory())] * 3
    module.means = lambda sums: sums
    module.train(model, batches, optimizer, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.train(model, batches, optimizer, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        module.means = means


def test_sums_are_of_all_images_not_means_of_batches():
    first = batch_sums(torch.tensor(1.0), torch.tensor([True, True, False]))
    second = batch_sums(torch.tensor(5.0), torch.tensor([False]))
    assert means(first + second) == {"loss": 2.0, "accuracy": 50.0}
