"""Memory and messages of a transformer's training, calculated: the formulas.

All results are bytes, of one GPU. what_fits.py makes a table of them for known
models, measure_memory.py compares them with what a small model needs. Sources:

- ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054
- activations, with and without tensor parallelism (TP): Korthikanti et al. 2022,
  https://arxiv.org/abs/2205.05198
- TP's all-reduces: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053
- a ring's share (n - 1) / n: doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests

A group is the GPUs among which HSDP, TP or a pipeline cuts the model, mostly those
of a node. Groups repeat each other as in DDP, or share what they have ("FSDP + TP").
In groups of one GPU HSDP, TP and a pipeline are DDP, and "FSDP + TP" is FSDP.
"""

from typing import NamedTuple

WAYS = "DDP", "ZeRO-1", "FSDP", "HSDP", "TP", "FSDP + TP", "pipeline"


class Shape(NamedTuple):
    """A transformer: as in model.py or, with llama, with what Llama has instead.

    That is RMSNorm, SwiGLU (an MLP of three matrices), fewer heads for keys and
    values, positions by rotation, and no biases. tied: the head is the embedding.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    length: int  # of a sequence, in tokens
    llama: bool = True
    tied: bool = False


def parameters(shape):
    """Return how many there are in the embedding, in a block, and in the head."""
    width, mlp, words = shape.width, shape.mlp, shape.vocabulary * shape.width
    kv = width * shape.kv_heads // shape.heads
    attention = 2 * width * width + 2 * width * kv  # queries, out; keys, values
    if shape.llama:
        block = attention + 3 * width * mlp + 2 * width
        return words, block, width + words * (not shape.tied)
    biases = (width + 2 * kv + width) + (mlp + width)
    block = attention + 2 * width * mlp + biases + 4 * width
    positions = shape.length * width
    return words + positions, block, 2 * width + words + shape.vocabulary


def count(shape):
    embedding, block, head = parameters(shape)
    return embedding + shape.layers * block + head


def state_bytes(parameters, way, ranks, group=1):
    """Return the bytes of weights, of gradients, and of Adam's state, in a tuple.

    All in 32 bits: 4 + 4 + 8 bytes a parameter, 16 in all. With 16-bit weights and a
    32-bit copy for Adam it is 16, too: 2 + 2 + 12 (ZeRO, 3.1). Here all is cut into
    equal parts. What TP leaves whole (norms, some biases), and Adam's counts of its
    steps, is small and not counted.
    """
    cuts = {
        "DDP": (1, 1, 1),
        "ZeRO-1": (1, 1, ranks),
        "FSDP": (ranks, ranks, ranks),
        "FSDP + TP": (ranks, ranks, ranks),
    }
    sizes = 4 * parameters, 4 * parameters, 8 * parameters
    each = cuts.get(way, (group, group, group))  # HSDP, TP, pipeline
    return tuple(size / cut for size, cut in zip(sizes, each, strict=True))


def share(ranks):
    """Return what part of a tensor each sends, when a ring gathers or reduces it."""
    return (ranks - 1) / ranks


def sent_bytes(parameters, way, ranks, group=1, gathered=4, reduced=4, kept=0):
    """Return the bytes that a GPU sends in a step for weights and gradients.

    gathered, reduced: bytes of a number when FSDP gathers weights and when gradients
    are reduced. kept: parameters that FSDP keeps whole between forward and backward
    pass, so that they are gathered once: the root's (reshard_after_forward).

    DDP: an all-reduce, which is a reduce-scatter and an all-gather. PyTorch's
    ZeroRedundancyOptimizer leaves that to DDP and sends the new weights as well (the
    paper's ZeRO-1 has a reduce-scatter in its place, and so no more than DDP). FSDP:
    two all-gathers, of weights, and a reduce-scatter, of gradients.
    """
    groups = ranks // group
    ddp = 2 * share(groups) * reduced * parameters / group  # between groups
    if way in ("DDP", "ZeRO-1"):
        ddp = 2 * share(ranks) * reduced * parameters
        return ddp + share(ranks) * 4 * parameters * (way == "ZeRO-1")
    fsdp = gathered * (2 * parameters - kept) + reduced * parameters
    if way == "FSDP":
        return share(ranks) * fsdp
    if way == "FSDP + TP":
        return share(groups) * fsdp / group
    return ddp + share(group) * fsdp * (way == "HSDP")


def sent_activations(size, layers, way, group=1):
    """Return the bytes of activations that a GPU sends in a step.

    size: bytes of tokens x width, for all that a group does in the step. TP: in each
    block two all-reduces forward and two backward, or with sequence parallelism as
    many bytes in other operations; the embedding's and the head's are not counted. A
    pipeline: what goes to the next stage and its gradient back, in a middle stage.
    """
    if "TP" in way:
        return 4 * layers * 2 * share(group) * size
    return min(group - 1, 2) * size if way == "pipeline" else 0


def block_activations(shape, tokens, size=4, cut=1, sequence=False):
    """Return the bytes that the forward pass of a block keeps for the backward one.

    size: bytes of a number; cut: ranks of TP; sequence: TP with sequence parallelism
    as Megatron has it. For each token, in numbers: what goes into and comes out of
    the two norms (4 widths); queries, keys, values and the result of attention; what
    goes into and comes out of GELU, or for SwiGLU the gate, its SiLU, the other half
    and their product. In 32 bits: a mean and a deviation of each norm, and a sum of
    each head.

    With GPT-2's block these are 16 widths, 32sbh bytes in 16 bits: Korthikanti's
    sbh(34 + 5as/h) without dropout's masks (2) and without 5as/h, since
    scaled_dot_product_attention keeps no scores. TP cuts all but the norms, 24 of
    32: the paper's sbh(10 + 24/t). Llama's terms are derived here in the same way.
    """
    width, kv = shape.width, shape.width * shape.kv_heads // shape.heads
    norms, mlp = 4 * width, (4 if shape.llama else 2) * shape.mlp
    numbers = (2 * width + 2 * kv + mlp) / cut + norms / (cut if sequence else 1)
    return tokens * (size * numbers + 4 * (4 + shape.heads / cut))


def logits_bytes(tokens, vocabulary, size=4):
    """Return the bytes that the logits need when the backward pass begins.

    The logits with `size` bytes a number and, in 32 bits, their log-softmax, which
    cross_entropy() keeps, and the gradients of both: four tensors.
    """
    return (size + 3 * 4) * tokens * vocabulary
