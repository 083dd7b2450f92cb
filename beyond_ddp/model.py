"""The transformer of ../dp_ddp_intro/model.py, which can be cut into stages.

Its parameters and results are the same. A layer's attention can be replaced, and
positions can start elsewhere than at 0.
"""

import os
from functools import partial

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from common.errors import UserError
from dataset import VOCABULARY


class Embedding(nn.Module):
    """Maps tokens (N, length) and their positions to vectors (N, length, width)."""

    def __init__(self, width, length):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)
        self.first = 0  # position of the first token, for context_parallel.py

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions + self.first)


class Block(nn.Module):
    """Attention, then an MLP, each with a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads  # fixed: a GPU may have only some heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(*mlp)
        # Causal: no token sees a later one.
        self.attention = partial(scaled_dot_product_attention, is_causal=True)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (N, heads, length, head_width) each
        attended = self.attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Maps tokens (N, length) to logits (N, length, VOCABULARY) of the next tokens.

    The default is the size of GPT-2 except for the vocabulary: 85 million parameters
    (https://huggingface.co/openai-community/gpt2). Raises UserError if width is not
    divisible by heads.
    """

    def __init__(self, layers=12, width=768, heads=12, length=256, verbose=False):
        super().__init__()
        if width % heads:
            problem = f"--width {width} is not divisible by --heads {heads}"
            raise UserError(f"{problem}; use --width {-(-width // heads) * heads}")
        blocks = [Block(width, heads) for _ in range(layers)]
        head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.layers = nn.Sequential(Embedding(width, length), *blocks, *head)
        if verbose:
            self.layers[0].register_forward_pre_hook(print_input_size)

    def stages(self, indices, num_stages):
        """Return the pipeline stages with these indices as an nn.ModuleList.

        The blocks are divided evenly over num_stages. The first stage also has the
        embedding. The last one has the head and returns logits (N * length,
        VOCABULARY).
        """
        blocks = len(self.layers) - 3  # without the embedding, the norm and the head
        inner_cuts = (1 + i * blocks // num_stages for i in range(1, num_stages))
        cuts = [0, *inner_cuts, None]
        layers = [*self.layers, nn.Flatten(0, 1)]
        stages = [nn.Sequential(*layers[cuts[i] : cuts[i + 1]]) for i in indices]
        return nn.ModuleList(stages)

    def forward(self, tokens):
        return self.layers(tokens)


def print_input_size(module, inputs):
    """Print the rank, the device and the size of the input, for --verbose."""
    rank = os.environ.get("RANK")  # set by torchrun
    process = f"rank {rank} on {inputs[0].device}" if rank else inputs[0].device
    line = f"Hello from {process} with input size {tuple(inputs[0].shape)}\n"
    print(line, end="")  # one write, or the lines of several processes mix
