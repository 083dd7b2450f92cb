"""Calculate GB per GPU for known models under DDP, ZeRO-1, FSDP, HSDP, TP, pipeline.

    python what_fits.py
    python what_fits.py --model 8b --gpus 8
    python what_fits.py --model 1b --gpus 4 --memory 24 --length 2048

Nothing is measured; memory_formulas.py has the formulas and their sources. A step
processes one sequence per GPU (--batch-size). 8 GPUs that share a sequence, by TP or
as a pipeline, process 8 sequences one after another, so that a step is the same work
for all strategies. All parts are added up, though they do not all exist at once.

With --bits 16, weights, gradients and Adam's state still have 32 bits. Activations
have 16, and so have the weights that FSDP gathers, as with its MixedPrecisionPolicy.
Other strategies keep 16-bit copies of the weights, as autocast makes them. Gradients
are sent in 32 bits, the default from PyTorch 2.15 on. DDP has
gradient_as_bucket_view=True, which saves 4 bytes per parameter.

Not included: CUDA, NCCL, fragmentation, and the 32-bit gradients of one block (or of
the head) while FSDP reduces them, up to 5 GB for 8b and 12 GB for 70b. "fits"
therefore means within 90 % of the memory.
"""

import argparse
from math import ceil

import memory_formulas as formulas
from common.errors import UserError, run
from memory_formulas import MODELS, total_parameters

USABLE = 0.9  # of the memory; assume that CUDA, NCCL, fragmentation take the rest
# H100, by its data sheet: FLOP/s in 16 bits and in TF32, without sparsity; bytes/s
# one way over NVLink 4, and over one NDR InfiniBand port (400 Gb/s) per GPU.
PEAK, NVLINK, NDR = {16: 989e12, 32: 494e12}, 450e9, 50e9
DEFAULT_MODELS = "gpt2", "8b", "70b"
PARTS = "weights", "gradients", "Adam", "copies", "logits"
TOTALS = " stored   recomputed  sent"


def calculate_bytes(shape, strategy, ranks, group, args, last=False):
    """Return {part: bytes} per GPU, or None if the model cannot be split like this.

    last: True for a pipeline's last stage, False for its first.
    """
    embedding, block, head = formulas.count_parameters(shape)
    total, root = total_parameters(shape), embedding + head
    is_pipeline, tp_size = strategy == "pipeline", group if "TP" in strategy else 1
    stage, first = shape.layers, is_pipeline and not last
    if is_pipeline and not 1 < group <= shape.layers:
        return None
    if shape.heads % tp_size or shape.kv_heads % tp_size:
        return None  # TP does not split a head
    if is_pipeline:
        stage = ceil(shape.layers / group)
        end = embedding if first else head + shape.tied * embedding
        total = group * (stage * block + end)  # as if all stages were like this one
    size, tokens = args.bits // 8, args.batch_size * shape.length
    state = formulas.state_bytes(total, strategy, ranks, group)
    parts = dict(zip(PARTS, state, strict=False))
    parts["copies"] = state[0] / 2 * (size == 2)
    if "FSDP" in strategy or strategy == "HSDP":
        # Weights of root, current and next block; gradients of root and block.
        parts["copies"] = size * (2 * root + 3 * block) / tp_size
    logits = formulas.logits_bytes(tokens, shape.vocabulary, size) / tp_size
    sequence, output = args.sequence_parallel, size * tokens * shape.width
    saved = formulas.block_activations(shape, tokens, size, tp_size, sequence)
    inputs = output / (tp_size if sequence else 1)  # of a block
    # A pipeline's first stage holds as many sequences as there are stages.
    blocks = stage * (group if first else 1)
    parts["activations"] = blocks * saved + 2 * inputs  # 2: saved by the last norm
    parts["recomputed"] = blocks * inputs + saved + 2 * inputs
    sent = formulas.sent_bytes(total, strategy, ranks, group, size, root)
    sent *= group if strategy == "FSDP + TP" else 1  # gathered for each sequence
    sent += formulas.sent_activations(group * output, shape.layers, strategy, group)
    return parts | {"logits": logits * (not first), "sent": sent}


def calculate_rows(shape, ranks, args):
    """Return {name of a row: calculate_bytes()} of all strategies."""
    case = ranks, min(ranks, args.gpus_per_node), args
    rows = {
        name: calculate_bytes(shape, name, *case) for name in formulas.STRATEGIES
    }
    last = calculate_bytes(shape, "pipeline", *case, last=True)
    return rows | {"pipeline, first": rows.pop("pipeline"), "pipeline, last": last}


def format_gb(amount):
    gb = amount / 1e9
    return f"{gb:.{2 if gb < 9.995 else 1 if gb < 99.95 else 0}f}"


def format_totals(parts, args):
    """Return the cells of TOTALS, with "fits" beside a total that does."""
    if not parts:
        return f"{'-':>5}{'-':>10}{'-':>11}"
    cells = ""
    for activations in ("activations", "recomputed"):
        total = parts[activations] + sum(parts[part] for part in PARTS)
        fits = total <= USABLE * args.memory * 1e9
        cells += f"{format_gb(total):>5} {'fits' * fits:4}"
    return f"{cells}{format_gb(parts['sent']):>6}"


def print_overview(names, args):
    """Print a row per model and strategy, with columns for each number of GPUs."""
    print(" " * 15 + "".join(f"{f'{n} GPUs':^26}" for n in args.gpus).rstrip())
    print(" " * 15 + TOTALS * len(args.gpus))
    for name, shape in names:
        total = total_parameters(shape)
        print(f"\n{name}: {total:,} parameters, {shape.length} tokens")
        columns = [calculate_rows(shape, ranks, args) for ranks in args.gpus]
        for row in columns[0]:
            line = "".join(format_totals(column[row], args) for column in columns)
            print(f"{row:15}{line}")


def print_details(name, shape, args):
    """Print the parts of a GPU's memory and their total, a row per strategy."""
    names = *PARTS, "activations", "recomputed"
    for ranks in args.gpus:
        print(f"{name}, {shape.length} tokens, GPUs: {ranks}")
        print(f"{'':15} {' '.join(names)}  |{TOTALS}")
        for row, parts in calculate_rows(shape, ranks, args).items():
            cells = [(format_gb(parts[p]) if parts else "-", len(p)) for p in names]
            line = "".join(f" {cell:>{width}}" for cell, width in cells)
            print(f"{row:15}{line}    {format_totals(parts, args)}")
        print()


def print_block_times(shape, args):
    """Print the time for a block's messages and for its arithmetic."""
    tokens, size, n = args.batch_size * shape.length, args.bits // 8, max(args.gpus)
    block, group = formulas.count_parameters(shape)[1], min(args.gpus_per_node, n)
    # FLOPs forward: 2 per weight and token, and 4 per number of the width for each
    # token attended to, length / 2 on average. Backward: twice that.
    work = 2 * tokens * (block + shape.length * shape.width) / PEAK[args.bits]
    reduced = formulas.sent_activations(size * tokens * shape.width, 1, "TP", group)
    weights = formulas.ring_share(n) * size * block
    lines = [
        ("DDP, backward", formulas.sent_bytes(block, "DDP", n), 2 * work),
        ("FSDP, forward", weights, work),
        ("FSDP, backward", weights + formulas.ring_share(n) * 4 * block, 2 * work),
        (f"TP {group}, both passes", reduced, 3 * work / group),
    ]
    print(f"One block, {tokens} tokens, GPUs: {n}. GB sent; ms at an H100's peak")
    for name, sent, seconds in lines[: 3 if shape.heads % group else 4]:
        times = [f"{1e3 * t:.2f}" for t in (sent / NVLINK, sent / NDR, seconds)]
        line = "{}: {} by NVLink, {} by NDR; arithmetic {}"
        print(f"{name:17}", line.format(format_gb(sent), *times))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="model; None: all but 1b")
    parser.add_argument(
        "--gpus", type=int, nargs="+", default=[8, 64, 512], help="GPUs in all"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="group size")
    parser.add_argument("--memory", type=float, default=80, help="GB per GPU")
    parser.add_argument("--length", type=int, help="tokens per sequence")
    parser.add_argument("--batch-size", type=int, default=1, help="batch per GPU")
    parser.add_argument(
        "--bits", type=int, choices=(16, 32), default=16, help="bits per activation"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="TP that splits the norms"
    )
    args = parser.parse_args()
    for n in args.gpus:
        if n % min(n, args.gpus_per_node):
            node = args.gpus_per_node
            raise UserError(f"{n} GPUs do not fill nodes of {node}; use a multiple")
    names = [MODELS[m] for m in ([args.model] if args.model else DEFAULT_MODELS)]
    if args.length:
        names = [(name, shape._replace(length=args.length)) for name, shape in names]
    print("Calculated: GB per GPU with all activations stored, or with activations")
    limit = f"{USABLE:.0%} of {args.memory:g}"
    print(f"recomputed (fits: within {limit}); GB sent per step.\n")
    if args.model:
        print_details(*names[0], args)
        print_block_times(names[0][1], args)
    else:
        print_overview(names, args)


if __name__ == "__main__":
    run(main)
