"""Measures what a GPU holds and sends in each way, beside what formulas.py says.

    sbatch jobscript_ddp.sh beyond_ddp/measure_memory.py
    sbatch --gpus-per-node=4 jobscript_ddp.sh beyond_ddp/measure_memory.py

It runs the scripts of this folder for four steps each, on a small model, and counts.
It needs no GPU.
"""

import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from tqdm import tqdm

import formulas
from common.cli import OptionParser, UserError, at_least
from common.device import get_device, get_ranks
from common.log import rank0_print
from dataset import VOCABULARY
from watch import Watch, unpack

STEPS, ACCUMULATE, TENSOR = 4, 4, 2
COLUMNS = "parameters", "gradients", "Adam's state", "activations", "sent"
OWN = {  # options of a script's own
    "accumulate": [f"--accumulate={ACCUMULATE}"],
    "fsdp_tp": [f"--tensor={TENSOR}"],
}
WAYS = {  # script: its way in formulas.py, the ranks among which a model is cut
    "ddp": ("DDP", 1),
    "accumulate": ("DDP", 1),
    "checkpointing": ("DDP", 1),
    "zero": ("ZeRO-1", 1),
    "fsdp": ("FSDP", 1),
    "hsdp": ("HSDP", 2),  # two GPUs play a node
    "tensor_parallel": ("TP", 0),  # 0: all
    "fsdp_tp": ("FSDP + TP", TENSOR),
    "pipeline": ("pipeline", 0),
}


def calculated(script, args, ranks):
    """Return the bytes of parameters, gradients, Adam, activations, and sent."""
    way, group = WAYS[script]
    group = group or ranks
    shape = formulas.Shape(
        args.layers, args.width, args.heads, args.heads, 4 * args.width,
        VOCABULARY, args.length, llama=False,
    )  # fmt: skip
    embedding, block, head = formulas.parameters(shape)
    everything, tokens = formulas.count(shape), args.batch_size * args.length
    cut, whole, blocks = everything, 0, args.layers
    if "TP" in way:  # it leaves whole: norms, biases of rows, embedding and head
        whole = embedding + head + args.layers * 6 * args.width
        cut, tokens = everything - whole, tokens * group
    if way == "pipeline":  # of the first stage, with as many micro-batches as stages
        blocks = args.layers // ranks
        cut = group * (embedding + blocks * block)
        tokens = tokens * ranks // args.micro_batches
    state = formulas.state_bytes(cut, way, ranks, group)
    data = ranks // group if way == "FSDP + TP" else 1
    state = [a + b * whole / data for a, b in zip(state, (4, 4, 8), strict=True)]
    size = 4 * tokens * args.width
    kept = formulas.block_activations(shape, tokens, cut=group if "TP" in way else 1)
    kept = size if script == "checkpointing" else kept
    ends = 8 * tokens + 8 * args.length  # tokens and positions, for the embedding
    if way == "pipeline":
        kept = ranks * (blocks * kept + ends)
        sent = 2 * formulas.share(ranks) * size * args.micro_batches
    else:  # the last norm, the head, the loss, and the targets
        ends += 2 * size + 8 * tokens + 4 * VOCABULARY * tokens + 8 * tokens
        kept = args.layers * kept + ends
        sent = formulas.sent_bytes(cut, way, ranks, group)
        sent += 12 * whole * formulas.share(data)  # by FSDP
        sent += formulas.sent_activations(size, args.layers, way, group)
    return [*state, kept, sent]


def measured(script, options, node, device):
    """Run a script on all ranks; return what calculated() does, of rank 0.

    What is sent is the mean over the ranks.
    """
    module = import_module(script)
    module.get_device = lambda local_rank: device  # a node of hsdp.py may be played
    sys.argv = [script, *map(str, options)]
    watch = Watch(STEPS, script == "zero")
    hook = register_optimizer_step_post_hook(watch.step)
    os.environ["LOCAL_WORLD_SIZE"] = str(node)
    saved = torch.autograd.graph.saved_tensors_hooks(watch.pack, unpack)
    with redirect_stdout(None), saved, watch:
        module.main()
    hook.remove()
    sent = torch.tensor(watch.sent / (watch.steps - 1), device=device)
    dist.all_reduce(sent)
    return [*watch.held, watch.kept, sent.item() / dist.get_world_size()]


def main():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--batch-size", type=at_least(1), default=16, help="sequences per GPU")
    add(
        "--layers", type=at_least(1), help="default: 4, or 1 per GPU if that is more"
    )
    add("--width", type=at_least(1), default=128, help="numbers for each token")
    add("--heads", type=at_least(1), help="default: 4, or 1 per GPU if that is more")
    add("--length", type=at_least(1), default=64, help="of a sequence, in tokens")
    args = parser.parse_args()
    rank, local_rank, ranks = get_ranks()
    if ranks % 2:
        raise UserError(f"{ranks} processes cannot be two equal nodes: use GPUS=2")
    args.layers, args.heads = (
        args.layers or max(4, ranks),
        args.heads or max(4, ranks),
    )
    node = os.environ["LOCAL_WORLD_SIZE"]
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # for ddp.py
    device = get_device(local_rank)
    dist.init_process_group()
    # One group for all the scripts: to make another each time would take longer.
    dist.init_process_group, end = lambda: None, dist.destroy_process_group
    dist.destroy_process_group = lambda: None
    options = [f"--{name.replace('_', '-')}={n}" for name, n in vars(args).items()]
    args.micro_batches = max(4, ranks)
    OWN["pipeline"] = [f"--micro-batches={args.micro_batches}"]
    one = f"{args.layers} layers of width {args.width}"
    rank0_print(
        f"{ranks} ranks, {one}, {args.batch_size} x {args.length} tokens each"
    )
    rank0_print("MB of a rank, counted and calculated; sent: in a step")
    rank0_print(f"{'':15}" + "".join(f"{column:^18}" for column in COLUMNS))
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # for their logs/
        hide = None if rank == 0 else True  # None: where there is no terminal
        ways = tqdm(WAYS.items(), "scripts", leave=False, disable=hide)
        for script, (way, _) in ways:
            batches = STEPS * (ACCUMULATE if script == "accumulate" else 1)
            own = [f"--sequences={batches * args.batch_size * ranks}", "--epochs=1"]
            inside = 2 if way == "HSDP" else node
            counted = measured(
                script, options + own + OWN.get(script, []), inside, device
            )
            pairs = zip(counted, calculated(script, args, ranks), strict=True)
            cells = [f"{a / 1e6:9.3f} {b / 1e6:<8.3f}" for a, b in pairs]
            rank0_print(f"{script:15}" + "".join(cells))
        os.chdir("/")
    end()


if __name__ == "__main__":
    main()
