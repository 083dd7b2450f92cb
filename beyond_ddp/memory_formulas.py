"""Formulas for the memory and the communication of training a transformer.

All results are bytes per GPU. what_fits.py prints a table for known models. Sources:

- ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054
- activations, with and without tensor parallelism (TP): Korthikanti et al. 2022,
  https://arxiv.org/abs/2205.05198
- TP's all-reduces: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053
- a ring's share (n - 1) / n: doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests

A group is the set of GPUs over which HSDP, TP or a pipeline splits the model,
usually one node. Groups are replicas as in DDP, or shard with each other
("FSDP + TP"). With groups of one GPU, HSDP, TP and pipeline are DDP, and "FSDP + TP"
is FSDP.
"""

from typing import NamedTuple

STRATEGIES = "DDP", "ZeRO-1", "FSDP", "HSDP", "TP", "FSDP + TP", "pipeline"


class Shape(NamedTuple):
    """The size of a transformer like model.py's or, with llama=True, like Llama.

    Llama has RMSNorm, SwiGLU (an MLP of three matrices), fewer heads for keys and
    values, rotary position embeddings, and no biases. tied: the head shares the
    embedding's weights.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    length: int  # tokens per sequence
    llama: bool = True
    tied: bool = False


# GPT-2 as in model.py, the others from their config.json: num_hidden_layers,
# hidden_size, num_attention_heads, num_key_value_heads, intermediate_size,
# vocab_size. Llama 3 was trained with 8192 tokens.
# https://huggingface.co/meta-llama: Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.2-1B
MODELS = {
    "gpt2": ("GPT-2", Shape(12, 768, 12, 12, 3072, 256, 256, llama=False)),
    "1b": ("Llama-3.2-1B", Shape(16, 2048, 32, 8, 8192, 128256, 8192, tied=True)),
    "8b": ("Llama-3-8B", Shape(32, 4096, 32, 8, 14336, 128256, 8192)),
    "70b": ("Llama-3-70B", Shape(80, 8192, 64, 8, 28672, 128256, 8192)),
}


def count_parameters(shape):
    """Return the numbers of parameters of embedding, one block and head."""
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


def total_parameters(shape):
    """Return the number of parameters of the whole model."""
    embedding, block, head = count_parameters(shape)
    return embedding + shape.layers * block + head


def state_bytes(parameters, strategy, ranks, group=1):
    """Return the bytes of weights, of gradients, and of Adam's state, as a tuple.

    All in 32 bits: 4 + 4 + 8 bytes per parameter, 16 in all. 16-bit weights and
    gradients with a 32-bit copy of the weights for Adam need 16 as well: 2 + 2 + 12
    (ZeRO, 3.1). Shards are taken to be of equal size. What TP does not split (norms,
    some biases) and Adam's step counters are small and left out.
    """
    shards = group  # HSDP, TP, pipeline
    if strategy in ("DDP", "ZeRO-1"):
        shards = 1
    if strategy in ("FSDP", "FSDP + TP"):
        shards = ranks
    adam_shards = ranks if strategy == "ZeRO-1" else shards
    weights = 4 * parameters / shards
    return weights, weights, 8 * parameters / adam_shards


def ring_share(ranks):
    """Return the share of a tensor that a rank sends in a ring gather or reduce."""
    return (ranks - 1) / ranks


def sent_bytes(parameters, strategy, ranks, group=1, gathered=4, kept=0):
    """Return the bytes that a GPU sends in a step for weights and gradients.

    gathered: bytes per number when FSDP gathers weights. Gradients are reduced in 32
    bits. kept: the number of parameters in the root, which FSDP gathers only once,
    because they stay gathered until the backward pass (reshard_after_forward).

    DDP: an all-reduce, which is a reduce-scatter and an all-gather. PyTorch's
    ZeroRedundancyOptimizer leaves that to DDP and broadcasts the new weights on top
    of it. The paper's ZeRO-1 replaces it by a reduce-scatter and sends no more than
    DDP. FSDP: two all-gathers of weights, and a reduce-scatter of gradients.
    """
    groups = ranks // group
    ddp = 2 * ring_share(groups) * 4 * parameters / group  # between groups
    if strategy in ("DDP", "ZeRO-1"):
        ddp = 2 * ring_share(ranks) * 4 * parameters
        return ddp + ring_share(ranks) * 4 * parameters * (strategy == "ZeRO-1")
    fsdp = gathered * (2 * parameters - kept) + 4 * parameters
    if strategy == "FSDP":
        return ring_share(ranks) * fsdp
    if strategy == "FSDP + TP":
        return ring_share(groups) * fsdp / group
    return ddp + ring_share(group) * fsdp * (strategy == "HSDP")


def sent_activations(size, layers, strategy, group=1):
    """Return the bytes of activations that a GPU sends in a step.

    size: bytes of tokens x width, for all tokens of a group in the step. TP: each
    block has two all-reduces in the forward pass and two in the backward pass;
    sequence parallelism sends the same number of bytes in other collectives. The
    collectives of embedding and head are left out. Pipeline: a middle stage sends
    activations to the next stage and gradients to the previous one.
    """
    if "TP" in strategy:
        return 4 * layers * 2 * ring_share(group) * size
    return min(group - 1, 2) * size if strategy == "pipeline" else 0


def block_activations(shape, tokens, size=4, tp_size=1, sequence=False):
    """Return the bytes that a block's forward pass saves for the backward pass.

    size: bytes per number; tp_size: ranks of TP; sequence: TP with sequence
    parallelism as in Megatron. Numbers saved per token: inputs and outputs of the
    two norms (4 widths); queries, keys, values and the result of attention; input
    and output of GELU, or for SwiGLU the gate, its SiLU, the other half and their
    product. In 32 bits: mean and deviation of each norm, and a sum per head.

    For GPT-2's block these are 16 widths, 32sbh bytes in 16 bits: Korthikanti's
    sbh(34 + 5as/h) without the dropout masks (2) and without 5as/h, since
    scaled_dot_product_attention saves no scores. TP splits 24 of the 32, all but the
    norms: the paper's sbh(10 + 24/t). Llama's terms are derived in the same way.
    """
    width, kv = shape.width, shape.width * shape.kv_heads // shape.heads
    norms, mlp = 4 * width, (4 if shape.llama else 2) * shape.mlp
    numbers = (2 * width + 2 * kv + mlp) / tp_size
    numbers += norms / (tp_size if sequence else 1)
    return tokens * (size * numbers + 4 * (4 + shape.heads / tp_size))


def logits_bytes(tokens, vocabulary, size=4):
    """Return the bytes that the logits need when the backward pass begins.

    Four tensors: the logits, with `size` bytes per number, and in 32 bits their
    log-softmax, which cross_entropy() saves, and the gradients of both.
    """
    return (size + 3 * 4) * tokens * vocabulary
