"""Measure what a GPU holds and sends under each strategy; compare with formulas.

    sbatch jobscript_ddp.sh measure_memory.py
    sbatch --gpus-per-node=4 jobscript_ddp.sh measure_memory.py

Runs the scripts of this folder for four steps each, on a small model. Needs no GPU.
"""

import argparse
import os
import socket
import sys
import warnings
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm

import memory_formulas as formulas
from common.data import REPOSITORY
from common.device import get_ranks
from common.errors import run
from dataset import VOCABULARY
from memory_tracker import MemoryTracker, unpack

STEPS, ACCUMULATE, TENSOR = 4, 4, 2
BATCH, LENGTH, WIDTH = 16, 64, 128
COLUMNS = "parameters", "gradients", "Adam's state", "activations", "sent"
EXTRA_OPTIONS = {
    "accumulate": [f"--accumulate={ACCUMULATE}"],
    "fsdp_tp": [f"--tensor={TENSOR}"],
}
STRATEGIES = {  # script: (strategy in memory_formulas.py, ranks per group)
    "ddp": ("DDP", 1),
    "accumulate": ("DDP", 1),
    "bf16_gradients": ("DDP", 1),
    "checkpointing": ("DDP", 1),
    "zero": ("ZeRO-1", 1),
    "fsdp": ("FSDP", 1),
    "hsdp": ("HSDP", 2),  # two GPUs stand in for a node
    "tensor_parallel": ("TP", 0),  # 0: all
    "fsdp_tp": ("FSDP + TP", TENSOR),
    "context_parallel": ("CP", 0),
    "pipeline": ("pipeline", 0),
}


def calculate(script, layers, micro_batches, ranks):
    """Return the bytes of COLUMNS, by the formulas, with a head for each layer."""
    strategy, group = STRATEGIES[script]
    group = group or ranks
    size = layers, WIDTH, layers, layers, 4 * WIDTH, VOCABULARY, LENGTH
    shape = formulas.Shape(*size, llama=False)
    embedding, block, head = formulas.count_parameters(shape)
    total, tokens = formulas.total_parameters(shape), BATCH * LENGTH
    split, whole, tp_size = total, 0, 1
    if "TP" in strategy:
        # Not split: norms, biases of row-wise matrices, embedding and head.
        whole, tp_size = embedding + head + layers * 6 * WIDTH, group
        split, tokens = total - whole, tokens * group
    if strategy == "pipeline":  # the first stage: it holds a micro-batch per stage
        blocks = layers // ranks
        split = group * (embedding + blocks * block)
        tokens = tokens * ranks // micro_batches
    state = formulas.state_bytes(split, strategy, ranks, group)
    shards = ranks // group if strategy == "FSDP + TP" else 1
    state = [a + b * whole / shards for a, b in zip(state, (4, 4, 8), strict=True)]
    size = 4 * tokens * WIDTH
    saved = formulas.block_activations(shape, tokens, tp_size=tp_size)
    saved = size if script == "checkpointing" else saved
    ends = 8 * tokens + 8 * LENGTH  # tokens and positions, for the embedding
    if strategy == "pipeline":
        saved = ranks * (blocks * saved + ends)
        sent = 2 * formulas.ring_share(ranks) * size * micro_batches
        return [*state, saved, sent]
    # The last norm, the head, the loss, and the targets.
    ends += 2 * size + 8 * tokens + 4 * VOCABULARY * tokens + 8 * tokens
    reduced = 2 if script == "bf16_gradients" else 4  # bytes per gradient
    sent = formulas.sent_bytes(split, strategy, ranks, group, reduced=reduced)
    sent += 12 * whole * formulas.ring_share(shards)  # by FSDP
    sent += formulas.sent_activations(size, layers, strategy, group)
    return [*state, layers * saved + ends, sent]


def measure(script, options):
    """Run a script on this rank; return the bytes of COLUMNS."""
    sys.argv = [script, *map(str, options)]
    tracker = MemoryTracker(STEPS, script == "zero")
    hook = register_optimizer_step_post_hook(tracker.after_step)
    saved = torch.autograd.graph.saved_tensors_hooks(tracker.pack, unpack)
    with redirect_stdout(StringIO()), saved, tracker:
        import_module(script).main()
    hook.remove()
    return [*tracker.held, tracker.peak_saved, tracker.sent / (tracker.steps - 1)]


def choose_port(store, script, rank):
    """Let the next init_process_group() meet at a new port of rank 0.

    In the same store it would find the addresses of the last process group.
    """
    if rank == 0:
        with socket.create_server(("", 0)) as server:
            store.set(f"{script}/port", str(server.getsockname()[1]))
    os.environ["MASTER_PORT"] = store.get(f"{script}/port").decode()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"


def mean_over_ranks(store, script, rank, ranks, number):
    """Return the mean of all ranks' numbers."""
    store.set(f"{script}/{rank}", str(number))
    return sum(float(store.get(f"{script}/{i}")) for i in range(ranks)) / ranks


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # see README.md
    rank, _, ranks = get_ranks()
    print_line = print if rank == 0 else lambda line: None  # one table
    node_size = os.environ["LOCAL_WORLD_SIZE"]
    store, _, _ = next(dist.rendezvous("env://"))  # torchrun's, or that of rank 0
    # For ddp.py alone: model.py and dataset.py are found here first.
    sys.path.append(str(REPOSITORY / "dp_ddp_intro"))
    layers, micro_batches = max(4, ranks), max(4, ranks)
    EXTRA_OPTIONS["pipeline"] = [f"--micro-batches={micro_batches}"]
    options = f"--layers={layers} --heads={layers} --width={WIDTH}".split()
    options += f"--batch-size={BATCH} --length={LENGTH} --epochs=1".split()
    model = f"{layers} layers of width {WIDTH}"
    print_line(f"{ranks} ranks, {model}, {BATCH} x {LENGTH} tokens each")
    print_line("MB per rank, measured and calculated; sent: per step")
    print_line(f"{'':16}" + "".join(f"{column:^18}" for column in COLUMNS))
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # for their logs/
        hide = None if rank == 0 else True  # None: shown only on a terminal
        bar = tqdm(STRATEGIES.items(), "scripts", leave=False, disable=hide)
        for script, (strategy, _) in bar:
            batches = STEPS * (ACCUMULATE if script == "accumulate" else 1)
            more = [f"--sequences={batches * BATCH * ranks}"]
            more += EXTRA_OPTIONS.get(script, [])
            os.environ["LOCAL_WORLD_SIZE"] = "2" if strategy == "HSDP" else node_size
            choose_port(store, script, rank)
            measured = measure(script, options + more)
            sent = mean_over_ranks(store, script, rank, ranks, measured.pop())
            calculated = calculate(script, layers, micro_batches, ranks)
            pairs = zip([*measured, sent], calculated, strict=True)
            cells = [f"{a / 1e6:9.3f} {b / 1e6:<8.3f}" for a, b in pairs]
            print_line(f"{script:16}" + "".join(cells))
        os.chdir("/")


if __name__ == "__main__":
    run(main)
