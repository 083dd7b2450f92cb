"""Measure what a GPU holds and sends under each strategy; compare with formulas.py.

    sbatch run-2gpus.sh measure_memory.py
    sbatch --gpus-per-node=4 run-2gpus.sh measure_memory.py

Runs the scripts of this folder for four steps each, on a small model. Needs no GPU.
"""

import argparse
import os
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

import formulas
from common.data import REPOSITORY
from common.device import get_device, get_ranks
from common.errors import UserError, run
from common.log import rank0_print
from dataset import VOCABULARY
from memory_tracker import MemoryTracker, unpack

STEPS, ACCUMULATE, TENSOR = 4, 4, 2
COLUMNS = "parameters", "gradients", "Adam's state", "activations", "sent"
EXTRA_OPTIONS = {
    "accumulate": [f"--accumulate={ACCUMULATE}"],
    "fsdp_tp": [f"--tensor={TENSOR}"],
}
STRATEGIES = {  # script: (strategy in formulas.py, ranks per group)
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


def calculate(script, args, ranks):
    """Return the bytes of COLUMNS, by the formulas."""
    strategy, group = STRATEGIES[script]
    group = group or ranks
    shape = formulas.Shape(
        args.layers, args.width, args.heads, args.heads, 4 * args.width,
        VOCABULARY, args.length, llama=False,
    )  # fmt: skip
    embedding, block, head = formulas.count_parameters(shape)
    total, tokens = formulas.total_parameters(shape), args.batch_size * args.length
    split, whole, blocks, tp_size = total, 0, args.layers, 1
    if "TP" in strategy:
        # Not split: norms, biases of row-wise matrices, embedding and head.
        whole, tp_size = embedding + head + args.layers * 6 * args.width, group
        split, tokens = total - whole, tokens * group
    if strategy == "pipeline":  # the first stage: it holds a micro-batch per stage
        blocks = args.layers // ranks
        split = group * (embedding + blocks * block)
        tokens = tokens * ranks // args.micro_batches
    state = formulas.state_bytes(split, strategy, ranks, group)
    shards = ranks // group if strategy == "FSDP + TP" else 1
    state = [a + b * whole / shards for a, b in zip(state, (4, 4, 8), strict=True)]
    size = 4 * tokens * args.width
    saved = formulas.block_activations(shape, tokens, tp_size=tp_size)
    saved = size if script == "checkpointing" else saved
    ends = 8 * tokens + 8 * args.length  # tokens and positions, for the embedding
    if strategy == "pipeline":
        saved = ranks * (blocks * saved + ends)
        sent = 2 * formulas.ring_share(ranks) * size * args.micro_batches
    else:  # the last norm, the head, the loss, and the targets
        ends += 2 * size + 8 * tokens + 4 * VOCABULARY * tokens + 8 * tokens
        saved = args.layers * saved + ends
        size_of_gradient = 2 if script == "bf16_gradients" else 4
        sent = formulas.sent_bytes(
            split, strategy, ranks, group, reduced=size_of_gradient
        )
        sent += 12 * whole * formulas.ring_share(shards)  # by FSDP
        sent += formulas.sent_activations(size, args.layers, strategy, group)
    return [*state, saved, sent]


def measure(script, options, gpus_per_node, device):
    """Run a script on all ranks; return the bytes of COLUMNS.

    "sent" is the mean over all ranks; the others are those of rank 0.
    """
    module = import_module(script)
    module.get_device = lambda local_rank: device  # LOCAL_WORLD_SIZE may be made up
    sys.argv = [script, *map(str, options)]
    tracker = MemoryTracker(STEPS, script == "zero")
    hook = register_optimizer_step_post_hook(tracker.after_step)
    os.environ["LOCAL_WORLD_SIZE"] = str(gpus_per_node)
    saved = torch.autograd.graph.saved_tensors_hooks(tracker.pack, unpack)
    with redirect_stdout(StringIO()), saved, tracker:
        module.main()
    hook.remove()
    sent = torch.tensor(tracker.sent / (tracker.steps - 1), device=device)
    dist.all_reduce(sent)
    return [*tracker.held, tracker.peak_saved, sent.item() / dist.get_world_size()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=16, help="batch per GPU")
    default = "default: 4, or 1 per GPU if that is more"
    parser.add_argument("--layers", type=int, help=f"transformer layers ({default})")
    parser.add_argument("--width", type=int, default=128, help="embedding dimension")
    parser.add_argument("--heads", type=int, help=f"attention heads ({default})")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # see README.md
    rank, local_rank, ranks = get_ranks()
    if ranks % 2:
        raise UserError(f"{ranks} processes cannot be two equal nodes; use GPUS=2")
    args.layers = args.layers or max(4, ranks)
    args.heads = args.heads or max(4, ranks)
    gpus_per_node = os.environ["LOCAL_WORLD_SIZE"]
    sys.path.append(str(REPOSITORY / "dp_ddp_intro"))  # for ddp.py
    device = get_device(local_rank)
    dist.init_process_group()
    # One process group for all scripts saves time.
    dist.init_process_group, end = lambda: None, dist.destroy_process_group
    dist.destroy_process_group = lambda: None
    options = [f"--{name.replace('_', '-')}={n}" for name, n in vars(args).items()]
    args.micro_batches = max(4, ranks)
    EXTRA_OPTIONS["pipeline"] = [f"--micro-batches={args.micro_batches}"]
    model = f"{args.layers} layers of width {args.width}"
    rank0_print(
        f"{ranks} ranks, {model}, {args.batch_size} x {args.length} tokens each"
    )
    rank0_print("MB per rank, measured and calculated; sent: per step")
    rank0_print(f"{'':16}" + "".join(f"{column:^18}" for column in COLUMNS))
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # for their logs/
        hide = None if rank == 0 else True  # None: shown only on a terminal
        bar = tqdm(STRATEGIES.items(), "scripts", leave=False, disable=hide)
        for script, (strategy, _) in bar:
            batches = STEPS * (ACCUMULATE if script == "accumulate" else 1)
            more = [f"--sequences={batches * args.batch_size * ranks}", "--epochs=1"]
            more += EXTRA_OPTIONS.get(script, [])
            node = 2 if strategy == "HSDP" else gpus_per_node
            measured = measure(script, options + more, node, device)
            pairs = zip(measured, calculate(script, args, ranks), strict=True)
            cells = [f"{a / 1e6:9.3f} {b / 1e6:<8.3f}" for a, b in pairs]
            rank0_print(f"{script:16}" + "".join(cells))
        os.chdir("/")
    end()


if __name__ == "__main__":
    run(main)
