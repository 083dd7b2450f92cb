"""What fits with what: GB of each GPU's memory, calculated for known models.

    cd dp_ddp_intro
    python beyond_ddp/what_fits.py
    python beyond_ddp/what_fits.py --model 8b --gpus 8
    python beyond_ddp/what_fits.py --model 1b --gpus 4 --memory 24 --length 2048

Nothing is measured; formulas.py has the formulas and their sources. A step is one
sequence per GPU (--batch-size). A group of 8 GPUs that works on a sequence together,
by TP or as a pipeline, takes 8 of them, one after another: each way does the same
work in a step. All that a GPU needs is added up, though some of it comes and goes.

With 16 bits weights, gradients and Adam's state still have 32. Activations have 16,
and what FSDP gathers, as by its MixedPrecisionPolicy; other ways have 16-bit copies
of weights, as autocast makes them. Gradients travel in 32 bits, as by default from
PyTorch 2.15 on. DDP has gradient_as_bucket_view=True: 4 bytes a parameter less.
"""

import signal
from math import ceil

import formulas
from common.cli import OptionParser, UserError, at_least
from formulas import Shape, count

# GPT-2 as in model.py. The others by their config.json, where the numbers are called
# num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads,
# intermediate_size and vocab_size; Llama 3 was trained with 8192 tokens.
# https://huggingface.co/meta-llama: Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.2-1B
MODELS = {
    "gpt2": ("GPT-2", Shape(12, 768, 12, 12, 3072, 256, 256, llama=False)),
    "1b": ("Llama-3.2-1B", Shape(16, 2048, 32, 8, 8192, 128256, 8192, tied=True)),
    "8b": ("Llama-3-8B", Shape(32, 4096, 32, 8, 14336, 128256, 8192)),
    "70b": ("Llama-3-70B", Shape(80, 8192, 64, 8, 28672, 128256, 8192)),
}
ROOM = 0.9  # of the memory; assumed: CUDA, NCCL and gaps take the rest
# An H100's data sheet: FLOP/s in 16 bits and in TF32, without sparsity; bytes/s one
# way by NVLink 4, and by a port of NDR InfiniBand (400 Gb/s) for each GPU.
PEAK, NVLINK, NDR = {16: 989e12, 32: 494e12}, 450e9, 50e9
SHOWN = "gpt2", "8b", "70b"  # in the table of all
PARTS = "weights", "gradients", "Adam", "copies", "logits"


def row(shape, way, ranks, group, args, last=False):
    """Return {part: bytes} of a GPU (of a pipeline's first or last), or None."""
    embedding, block, head = formulas.parameters(shape)
    total, root, cut = count(shape), embedding + head, group if "TP" in way else 1
    stage, first = shape.layers, way == "pipeline" and not last
    few = way == "pipeline" and not 1 < group <= shape.layers
    if few or shape.heads % cut or shape.kv_heads % cut:
        return None  # each GPU of TP has whole heads
    if way == "pipeline":
        stage = ceil(shape.layers / group)
        end = embedding if first else head + shape.tied * embedding
        total = group * (stage * block + end)  # as if all had as much as this one
    size, tokens = args.bits // 8, args.batch_size * shape.length
    state = formulas.state_bytes(total, way, ranks, group)
    found = dict(zip(PARTS, state, strict=False))
    found["copies"] = state[0] / 2 * (size == 2)
    if "FSDP" in way or way == "HSDP":
        # Weights of root, block at work, next block; gradients of root and block.
        found["copies"] = size * (2 * root + 3 * block) / cut
    logits = formulas.logits_bytes(tokens, shape.vocabulary, size) / cut
    sequence, passed = args.sequence_parallel, size * tokens * shape.width
    one = formulas.block_activations(shape, tokens, size, cut, sequence)
    held = passed / (cut if sequence else 1)  # from block to block
    # A pipeline's first stage works ahead, on as many sequences as there are stages.
    blocks = stage * (group if first else 1)
    found["kept"] = blocks * one + 2 * held  # 2: what the last norm keeps
    found["again"] = blocks * held + one + 2 * held
    sent = formulas.sent_bytes(total, way, ranks, group, size, 4, root)
    sent *= group if way == "FSDP + TP" else 1  # gathered for each sequence
    sent += formulas.sent_activations(group * passed, shape.layers, way, group)
    return found | {"logits": logits * (not first), "sent": sent}


def rows(shape, ranks, args):
    """Return {what a row is called: row()} for each way on so many GPUs."""
    case = ranks, min(ranks, args.node), args
    found = {way: row(shape, way, *case) for way in formulas.WAYS}
    last = row(shape, "pipeline", *case, last=True)
    return found | {"pipeline, first": found.pop("pipeline"), "pipeline, last": last}


def number(amount):
    gb = amount / 1e9
    return f"{gb:.{2 if gb < 9.995 else 1 if gb < 99.95 else 0}f}"


def sums(found, args):
    """Return cells: what a GPU needs in both cases, if it fits; what it sends."""
    if not found:
        return f"{'-':>5}{'-':>10}{'-':>11}"
    text = ""
    for kind in ("kept", "again"):
        total = found[kind] + sum(found[part] for part in PARTS)
        fits = total <= ROOM * args.memory * 1e9
        text += f"{number(total):>5} {'fits' * fits:4}"
    return f"{text}{number(found['sent']):>6}"


def overview(names, args):
    """Print for each model and way a row, with columns for each number of GPUs."""
    print(" " * 15 + "".join(f"{f'{n} GPUs':^26}" for n in args.gpus).rstrip())
    print(" " * 15 + f"{'kept':>5}{'again':>10}{'sent':>11}" * len(args.gpus))
    for name, shape in names:
        print(f"\n{name}: {count(shape):,} parameters, {shape.length} tokens")
        columns = [rows(shape, ranks, args) for ranks in args.gpus]
        for way in columns[0]:
            line = "".join(sums(column[way], args) for column in columns)
            print(f"{way:15}{line}")


def details(name, shape, args):
    """Print what is in a GPU's memory, a row for each way."""
    parts = *PARTS, "kept", "again"
    for ranks in args.gpus:
        head = " ".join(parts) + "     kept     again       sent"
        print(f"{name}, {shape.length} tokens, GPUs: {ranks}\n{'':15} {head}")
        for way, found in rows(shape, ranks, args).items():
            line = [(number(found[p]) if found else "-", len(p) + 1) for p in parts]
            line = "".join(f"{cell:>{width}}" for cell, width in line)
            print(f"{way:15}{line}    {sums(found, args)}")
        print()


def one_block(shape, args):
    """Print how long the messages of a block take, and how long its arithmetic."""
    tokens, size, n = args.batch_size * shape.length, args.bits // 8, max(args.gpus)
    block, group = formulas.parameters(shape)[1], min(args.node, n)
    # Forward: 2 for each weight; 4 for each number of the width and each token that
    # is looked at, length / 2 on average. The backward pass: twice that.
    work = 2 * tokens * (block + shape.length * shape.width) / PEAK[args.bits]
    reduced = formulas.sent_activations(size * tokens * shape.width, 1, "TP", group)
    weights = formulas.share(n) * size * block
    lines = [
        ("DDP, backward", formulas.sent_bytes(block, "DDP", n), 2 * work),
        ("FSDP, forward", weights, work),
        ("FSDP, backward", weights + formulas.share(n) * 4 * block, 2 * work),
        (f"TP {group}, both passes", reduced, 3 * work / group),
    ]
    print(f"One block, {tokens} tokens, GPUs: {n}. GB sent; ms at an H100's peak")
    for what, sent, seconds in lines[: 3 if shape.heads % group else 4]:
        times = [f"{1e3 * t:.2f}" for t in (sent / NVLINK, sent / NDR, seconds)]
        text = "{}: {} by NVLink, {} by NDR; arithmetic {}"
        print(f"{what:17}", text.format(number(sent), *times))


def main():
    parser = OptionParser(__doc__)
    add, some = parser.add_argument, at_least(1)
    add("--model", choices=MODELS, default=None, help="one; default: all but 1b")
    add("--gpus", type=some, nargs="+", default=[8, 64, 512], help="how many")
    add("--node", type=some, default=8, help="GPUs of a node, which are a group")
    add("--memory", type=at_least(0.0), default=80, help="of a GPU, in GB")
    add("--length", type=some, default=None, help="tokens; default: the model's")
    add("--batch-size", type=some, default=1, help="sequences per GPU")
    add("--bits", type=int, choices=(16, 32), default=16, help="of activations")
    add("--sequence-parallel", action="store_true", help="TP cuts the norms, too")
    args = parser.parse_args()
    for n in args.gpus:
        if n % min(n, args.node):
            text = f"{n} GPUs are not whole nodes of {args.node}: use --gpus"
            raise UserError(f"{text} {n - n % args.node}, or another --node")
    names = [MODELS[m] for m in ([args.model] if args.model else SHOWN)]
    if args.length:
        names = [(name, shape._replace(length=args.length)) for name, shape in names]
    print(f"Calculated: GB a GPU needs (fits: in {ROOM:.0%} of {args.memory:g})")
    print("and sends in a step. Activations are kept, or computed again.\n")
    if args.model:
        details(*names[0], args)
        one_block(names[0][1], args)
    else:
        overview(names, args)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it in silence
    main()
