"""dp_ddp_intro/dp_by_hand.py: it does what DataParallel does, and counts it."""

import sys
from collections import Counter
from types import SimpleNamespace

import conftest
import pytest
import torch
from conftest import REPOSITORY, call, run
from torch.nn.functional import cross_entropy

INTRO = REPOSITORY / "dp_ddp_intro"


@pytest.fixture
def by_hand():
    return conftest.load("dp_ddp_intro", "dp_by_hand")


def test_two_pieces_give_the_gradients_of_the_whole_batch(by_hand):
    torch.manual_seed(0)
    model = by_hand.Transformer(2, 32, 4, 8)
    tokens, targets = torch.randint(256, (2, 6, 8))
    loss, copied = by_hand.step(model, tokens, targets)
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    whole = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6)
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert copied == {
        "inputs out": 3 * 8 * 8,  # half of the sequences, of int64
        "weights out": weights,
        "logits back": 3 * 8 * 256 * 4,
        "gradients of the logits out": 3 * 8 * 256 * 4,
        "gradients of the weights back": weights,
    }


def test_pytorch_itself_copies_the_same(by_hand, monkeypatch):
    """Its scatter(), replicate() and gather(), with copies that only count."""
    copied = Counter()

    def scatter(tensor, gpus, *rest):
        pieces = tensor.chunk(2)
        copied["scatter"] += by_hand.size(pieces[1:])
        return pieces

    def broadcast(tensors, gpus):
        copied["broadcast"] += by_hand.size(tensors)
        return [[tensor.clone() for tensor in tensors] for _ in gpus]

    def gather(tensors, *rest):
        copied["gather"] += by_hand.size(tensors[1:])
        return torch.cat(tensors)

    def reduce_add(gradients, destination):
        copied["reduce_add"] += by_hand.size(gradients[1])
        return tuple(a + b for a, b in zip(*gradients, strict=True))

    functions = sys.modules["torch.nn.parallel._functions"]
    replication = sys.modules["torch.nn.parallel.replicate"]
    comm = SimpleNamespace(
        scatter=scatter,
        broadcast_coalesced=broadcast,
        gather=gather,
        reduce_add_coalesced=reduce_add,
    )
    for module in (functions, replication):
        monkeypatch.setattr(module, "comm", comm)
    for model, inputs, targets in by_hand.nets().values():
        copied.clear()
        first, second = functions.Scatter.apply([0, 1], None, 0, inputs)
        one, other = replication.replicate(model, [0, 1])
        outputs = one(first), other(second)
        output = functions.Gather.apply(0, 0, *outputs)
        cross_entropy(output.flatten(0, -2), targets.flatten()).backward()
        _, mine = by_hand.step(model, inputs, targets)
        assert copied["broadcast"] == mine["weights out"]
        assert copied["reduce_add"] == mine["gradients of the weights back"]
        back = mine["logits back"]
        assert copied["gather"] == back == mine["gradients of the logits out"]
        # Scatter once for the inputs, once for the gradients of the outputs.
        assert copied["scatter"] in (mine["inputs out"], mine["inputs out"] + back)


def test_the_nets_are_those_of_the_exercises(by_hand, capsys):
    nets = by_hand.nets()
    sizes = {
        name: by_hand.size(net[0].parameters()) // 4 for name, net in nets.items()
    }
    mnist = conftest.load("mnist_multigpu", "mnist_singlegpu").make_model()
    assert sizes["MNIST"] == sum(p.numel() for p in mnist.parameters())
    assert sizes["ResNet-152"] == 58_348_708  # cifar100_demo/README.md
    assert round(sizes["transformer"] / 1e6) == 86
    call(by_hand)
    table = capsys.readouterr().out
    assert all(name in table for name in nets)
    total = next(line for line in table.splitlines() if line.startswith("in all"))
    numbers = [float(word) for word in total.split()[-3:]]
    assert all(
        mb > 8 * size / 1e6 for mb, size in zip(numbers, sizes.values(), strict=True)
    )


def test_the_drawing(by_hand, tmp_path, monkeypatch, capsys):
    drawing = conftest.load("dp_ddp_intro", "draw_data_parallel")
    monkeypatch.setattr(drawing, "FILE", tmp_path / "img/data_parallel.png")
    call(drawing)
    assert (tmp_path / "img/data_parallel.png").read_bytes()[:4] == b"\x89PNG"
    copied = {
        "weights out": 40,
        "logits back": 1,
        "gradients of the weights back": 40,
    }
    dp = drawing.data_parallel(3, copied, 10)
    assert [(lane, start) for lane, start, *_ in dp] == [
        ("PCIe", 0),
        ("GPUs", 4),
        ("PCIe", 5),
        ("GPUs", pytest.approx(5.2)),
        ("PCIe", pytest.approx(7.2)),
    ]
    mb = 2**20
    ddp = [bar for bar in drawing.ddp(3, 51 * mb, 100 * mb) if bar[0] == "PCIe"]
    assert [bar[2] for bar in ddp] == [0.01, 0.25, 0.25]
    assert ddp[-1][1] == 3  # the last bucket goes when the backward pass is over


def test_it_runs_where_no_gpu_is():
    done = run([sys.executable, "dp_by_hand.py"], INTRO, CUDA_VISIBLE_DEVICES="-1")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "over PCIe 4" in done.stdout and "DDP" in done.stdout
