"""dp_ddp_intro/beyond_ddp: its formulas, and the table that is made of them."""

import importlib
import re
import sys

import conftest
import pytest
import torch
from conftest import REPOSITORY, call, run
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

INTRO = REPOSITORY / "dp_ddp_intro"
README = INTRO / "beyond_ddp/README.md"
COMMAND = "python beyond_ddp/what_fits.py"


def module(name, monkeypatch):
    monkeypatch.syspath_prepend(INTRO / "beyond_ddp")
    return importlib.import_module(name)


@pytest.fixture
def formulas(monkeypatch):
    return module("formulas", monkeypatch)


@pytest.fixture
def what_fits(monkeypatch):
    return module("what_fits", monkeypatch)


@pytest.fixture
def model():
    return conftest.load("dp_ddp_intro", "model")


# What the safetensors of https://huggingface.co/meta-llama have.
PUBLISHED = {"1b": 1_235_814_400, "8b": 8_030_261_248, "70b": 70_553_706_496}


def test_the_models_have_as_many_parameters_as_published(what_fits, model):
    for name, published in PUBLISHED.items():
        assert what_fits.count(what_fits.MODELS[name][1]) == published
    with torch.device("meta"):
        ours = sum(p.numel() for p in model.Transformer().parameters())
    assert what_fits.count(what_fits.MODELS["gpt2"][1]) == ours


def test_the_parts_of_a_small_model(formulas, model):
    shape = formulas.Shape(3, 24, 2, 2, 96, model.VOCABULARY, 8, llama=False)
    layers = model.Transformer(3, 24, 2, 8).layers
    parts = layers[:1], layers[1:2], layers[-2:]
    counted = [sum(p.numel() for p in part.parameters()) for part in parts]
    assert formulas.parameters(shape) == tuple(counted)


def test_adam_needs_16_bytes_a_parameter_and_shards_a_part(formulas):
    state, n = formulas.state_bytes, 8
    assert state(100, "DDP", n) == (400, 400, 800)
    assert state(100, "ZeRO-1", n) == (400, 400, 100)
    assert sum(state(100, "FSDP", n)) == 16 * 100 / n
    assert sum(state(100, "HSDP", 2 * n, n)) == 16 * 100 / n
    assert state(100, "HSDP", n, 1) == state(100, "DDP", n)
    for way in ("TP", "pipeline"):
        assert sum(state(100, way, 4 * n, n)) == 16 * 100 / n
    assert state(100, "FSDP + TP", 4 * n, n) == state(100, "FSDP", 4 * n)
    for way in formulas.WAYS:
        assert sum(state(100, way, 1)) == 1600, way


def test_adam_itself_needs_as_much(formulas, model):
    net = model.Transformer(2, 32, 4, 16)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.zeros(2, 16, dtype=torch.long)).sum().backward()
    optimizer.step()
    weights = list(net.parameters())
    kept = [t for state in optimizer.state.values() for t in state.values()]
    tensors = weights, [p.grad for p in weights], [t for t in kept if t.dim()]
    sizes = tuple(sum(4 * t.numel() for t in group) for group in tensors)
    count = sum(p.numel() for p in weights)
    assert sizes == formulas.state_bytes(count, "DDP", 1)


def test_what_is_sent(formulas):
    sent, n, size = formulas.sent_bytes, 8, 100
    for way in formulas.WAYS:  # one GPU has nobody to send to
        assert sent(size, way, 1) == 0 == formulas.sent_activations(size, 4, way)
    assert sent(size, "DDP", n) == 2 * 7 / 8 * 400
    assert sent(size, "DDP", 10**6) == pytest.approx(2 * 400, rel=1e-5)
    for way in ("FSDP", "ZeRO-1"):
        assert sent(size, way, n) == pytest.approx(1.5 * sent(size, "DDP", n))
    # Gathered in 16 bits FSDP sends no more than DDP; the root once, so less.
    half = sent(size, "FSDP", n, gathered=2)
    assert half == pytest.approx(sent(size, "DDP", n))
    less = sent(size, "FSDP", n, gathered=2, kept=40)
    assert half - less == pytest.approx(2 * 40 * 7 / 8)
    # Groups of 4, in a node: FSDP inside, and a quarter to the other nodes.
    inside, quarter = sent(size, "FSDP", 4), sent(size / 4, "DDP", 2)
    assert sent(size, "HSDP", n, 4) == pytest.approx(inside + quarter)
    assert sent(size, "HSDP", n, n) == sent(size, "FSDP", n)
    assert sent(size, "HSDP", n, 1) == sent(size, "DDP", n)
    for way in ("TP", "pipeline"):
        assert sent(size, way, n, 4) == quarter
        assert sent(size, way, n, n) == 0
    assert sent(size, "FSDP + TP", n, 4) == sent(size / 4, "FSDP", 2)


def test_activations_that_are_sent(formulas):
    sent = formulas.sent_activations
    for way in ("DDP", "ZeRO-1", "FSDP", "HSDP"):
        assert sent(100, 12, way, 8) == 0
    assert sent(100, 3, "TP", 2) == sent(100, 3, "FSDP + TP", 2) == 3 * 4 * 100
    assert sent(100, 3, "TP", 8) == pytest.approx(3 * 4 * 2 * 7 / 8 * 100)
    # A tensor to the next stage, a gradient back; of two stages each sends one.
    assert [sent(100, 12, "pipeline", n) for n in (2, 3, 8)] == [100, 200, 200]


def saved_bytes(function, *inputs, but=()):
    """Return the bytes that autograd saves for the backward pass, but parameters."""
    own = {p.untyped_storage().data_ptr() for p in but}
    storages, tensors = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        tensors.append(tensor)  # else its address may be another's soon
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*inputs)
    del result
    return sum(storages.values())


@pytest.mark.parametrize("size", [(4, 64, 128, 4), (2, 32, 96, 2), (1, 128, 256, 8)])
def test_a_block_keeps_what_the_formula_says(formulas, model, size):
    batch, length, width, heads = size
    shape = formulas.Shape(1, width, heads, heads, 4 * width, 256, length, False)
    block = model.Block(width, heads)
    inputs = torch.randn(batch, length, width, requires_grad=True) * 1
    kept = saved_bytes(block, inputs, but=block.parameters())
    said = formulas.block_activations(shape, batch * length)
    assert kept == pytest.approx(said, rel=0.01)


class LlamaBlock(nn.Module):
    """Llama's, but for its RMSNorm, which PyTorch fuses on GPUs alone."""

    def __init__(self, width, heads, kv_heads, mlp):
        super().__init__()
        self.heads, kv = (heads, kv_heads, kv_heads), width // heads * kv_heads
        sizes = (width, width), (width, kv), (width, kv), (width, width)
        sizes += (width, mlp), (width, mlp), (mlp, width)
        self.linear = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        *qkv, out, gate, up, down = self.linear
        normed, angle = self.norms[0](x), torch.rand(x.shape[1], 1)
        qkv = [
            linear(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for linear, heads in zip(qkv, self.heads, strict=True)
        ]
        for i in range(2):  # the rotation of positions
            left, right = qkv[i].chunk(2, -1)
            turned = torch.cat([-right, left], -1)
            qkv[i] = qkv[i] * angle.cos() + turned * angle.sin()
        found = scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
        x = x + out(found.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + down(silu(gate(normed)) * up(normed))


def test_so_does_a_block_of_llama(formulas):
    shape = formulas.Shape(1, 256, 8, 2, 896, 256, 64)
    block = LlamaBlock(256, 8, 2, 896)
    _, counted, _ = formulas.parameters(shape)
    assert sum(p.numel() for p in block.parameters()) == counted + 2 * 256  # biases
    inputs = torch.randn(4, 64, 256, requires_grad=True) * 1
    kept = saved_bytes(block, inputs, but=block.parameters())
    assert kept == pytest.approx(formulas.block_activations(shape, 256), rel=0.01)


def test_the_paper_has_the_same_formulas(formulas):
    """sbh(34 + 5as/h), and sbh(10 + 24/t) with TP, without dropout and 5as/h."""
    shape, sbh = formulas.Shape(1, 8192, 64, 64, 4 * 8192, 256, 1, False), 8192
    for t in (1, 2, 8):
        sums = 4 * (4 + 64 / t)  # in 32 bits, which the paper leaves out
        cut = formulas.block_activations(shape, 1, 2, t) - sums
        assert cut == pytest.approx(sbh * (10 - 2 + 24 / t))
        cut = formulas.block_activations(shape, 1, 2, t, sequence=True) - sums
        assert cut == pytest.approx(sbh * (34 - 2) / t)


def test_what_the_loss_keeps_of_the_logits(formulas):
    tokens, words = 64, 512
    logits = torch.randn(tokens, words, requires_grad=True) * 1
    targets = torch.zeros(tokens, dtype=torch.long)
    kept = saved_bytes(lambda: cross_entropy(logits, targets))
    assert kept == pytest.approx(4 * tokens * words, rel=0.02)  # the log-softmax
    assert formulas.logits_bytes(tokens, words) == 4 * 4 * tokens * words
    assert formulas.logits_bytes(tokens, words, 2) == (2 + 3 * 4) * tokens * words


def table(what_fits, capsys, *options):
    """Return {what a row is called: its cells} of the last table of a model."""
    call(what_fits, *options)
    lines = capsys.readouterr().out.split("One block")[0].splitlines()
    rows = [re.split(r" {2,}", line, maxsplit=1) for line in lines if "  " in line]
    return {row[0]: row[1].split() for row in rows if len(row) > 1 and row[0]}


def test_what_fits_fits(what_fits, capsys):
    rows = table(what_fits, capsys, "--model", "8b", "--gpus", 8)
    assert set(rows) >= {"DDP", "FSDP", "FSDP + TP", "pipeline, first"}
    # weights, gradients, Adam: 16 bytes a parameter, of which FSDP has an eighth
    assert rows["DDP"][:3] == ["32.1", "32.1", "64.2"]
    assert rows["FSDP"][:3] == ["4.02", "4.02", "8.03"]
    for cells in rows.values():
        parts = [float(cell) for cell in cells[:7]]
        rest = iter(cells[7:])
        for part in parts[5:]:
            total = float(next(rest))
            assert total == pytest.approx(sum(parts[:5]) + part, abs=0.6)
            assert total > 72 or next(rest) == "fits"  # 90 % of 80
        assert len([*rest]) == 1  # what is sent
    fits = {way: cells.count("fits") for way, cells in rows.items()}
    assert fits["DDP"] == fits["ZeRO-1"] == 0
    assert fits["FSDP"] == fits["HSDP"] == 1  # if activations are computed again
    assert fits["TP"] == 2
    small = table(what_fits, capsys, "--model", "8b", "--gpus", 8, "--memory", 20)
    assert not any("fits" in cells for cells in small.values())


def test_what_cannot_be_cut_so(what_fits, capsys):
    rows = table(what_fits, capsys, "--model", "gpt2", "--gpus", 8)
    assert set(rows["TP"]) == set(rows["FSDP + TP"]) == {"-"}  # 12 heads on 8 GPUs
    assert "-" not in rows["DDP"] + rows["pipeline, last"]
    rows = table(what_fits, capsys, "--model", "gpt2", "--gpus", 4)
    assert "-" not in rows["TP"]
    rows = table(what_fits, capsys, "--model", "1b", "--gpus", 32, "--node", 32)
    assert {way for way in rows if "-" in rows[way]} == {
        "TP",
        "FSDP + TP",
        "pipeline, first",
        "pipeline, last",
    }
    rows = table(what_fits, capsys, "--model", "8b", "--gpus", 1)
    assert {way for way in rows if "-" in rows[way]} == {
        "pipeline, first",
        "pipeline, last",
    }
    assert {cells[-1] for cells in rows.values()} == {"0.00", "-"}


def test_the_messages_of_a_block(what_fits, capsys):
    call(what_fits, "--model", "8b", "--gpus", 8)
    lines = capsys.readouterr().out.split("One block")[1].splitlines()[1:]
    said = {line[:17].strip(): re.findall(r"\d+\.\d+", line[17:]) for line in lines}
    said = {name: [float(number) for number in row] for name, row in said.items()}
    tokens, width, block = 8192, 4096, 218_112_000
    forward = 2 * tokens * block + 4 * tokens * (tokens / 2) * width
    work = 1e3 * forward / 989e12
    for name, gigabytes, milliseconds in (
        ("DDP, backward", 2 * 7 / 8 * 4 * block / 1e9, 2 * work),
        ("FSDP, forward", 7 / 8 * 2 * block / 1e9, work),
        ("FSDP, backward", 7 / 8 * (2 + 4) * block / 1e9, 2 * work),
        (
            "TP 8, both passes",
            4 * 2 * 7 / 8 * 2 * tokens * width / 1e9,
            3 * work / 8,
        ),
    ):
        times = 1e3 * gigabytes / 450, 1e3 * gigabytes / 50, milliseconds
        row = [gigabytes, *times]
        assert said.pop(name) == pytest.approx(row, abs=0.0051), name
    assert said == {}
    call(what_fits, "--model", "gpt2", "--gpus", 8)
    assert "TP 8" not in capsys.readouterr().out  # 12 heads


def test_parts_grow_with_what_they_are_made_of(what_fits, capsys):
    def row(way, *options):
        base = "--model", "8b", "--gpus", 8, *options
        return [
            float(c) for c in table(what_fits, capsys, *base)[way] if c != "fits"
        ]

    one, two = row("FSDP"), row("FSDP", "--batch-size", 2)
    assert one[:4] == two[:4] and two[4] == pytest.approx(2 * one[4], abs=0.1)
    assert two[5] == pytest.approx(2 * one[5], abs=0.1)
    assert row("FSDP", "--length", 4096)[4] == pytest.approx(one[4] / 2, abs=0.1)
    assert row("TP", "--sequence-parallel")[5] < row("TP")[5]
    assert row("DDP", "--bits", 32)[3] == 0  # no copies in 16 bits
    thirty_two = row("FSDP", "--bits", 32)
    assert thirty_two[5] == pytest.approx(2 * one[5], rel=0.01)
    ddp = row("DDP", "--bits", 32)[-1]
    assert ddp < thirty_two[-1] < 1.5 * ddp  # the root is gathered once


def test_it_runs_as_the_docstring_says(what_fits):
    commands = re.findall(r"^    python (.*)$", what_fits.__doc__, re.M)
    assert len(commands) == 3 and commands[0] == "beyond_ddp/what_fits.py"
    for command in commands:
        done = run([sys.executable, *command.split()], INTRO)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert done.stdout.startswith("Calculated")
        assert "DDP" in done.stdout and "fits" in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 96  # 4 more in a README


@pytest.mark.parametrize(
    "options", ["--gpus 12", "--gpus 0", "--model 9b", "--memory nan", "--bits 8"]
)
def test_a_mistake_is_one_line(options):
    command = sys.executable, "beyond_ddp/what_fits.py", *options.split()
    done = run(command, INTRO)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    name, value = options.split()
    assert value in done.stderr and name.strip("-") in done.stderr


def test_the_table_of_the_readme_is_what_the_script_prints():
    """The indented block that follows the command."""
    found = re.findall(
        rf"^{COMMAND}(?: +#.*)?\n```\n((?:\n|    .*\n)+)", README.read_text(), re.M
    )
    assert len(found) == 1
    shown = [line[4:].rstrip() for line in found[0].splitlines()]
    done = run([sys.executable, *COMMAND.split()[1:]], INTRO)
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert [line for line in shown if line] == [line for line in printed if line]
