"""A small transformer that predicts the next token of a sequence."""

import os

import torch
from torch import nn
from torch.nn import functional as F

from common.cli import UserError
from dataset import VOCABULARY


class Embedding(nn.Module):
    """Makes of tokens (N, length) vectors (N, length, width) with their position."""

    def __init__(self, width, length):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(length, width)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


class Block(nn.Module):
    """Attention, then an MLP; what each finds is added to its input."""

    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x):
        # A head's queries, keys and values are neighbours: whole heads can be split.
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (N, heads, length, head_width) each
        # Causal: a token looks back, never ahead.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """From tokens (N, length) to logits (N, length, VOCABULARY) of what comes next.

    By default as large as GPT-2 but for its vocabulary: 12 layers of width 768, 85
    million parameters (https://huggingface.co/openai-community/gpt2). Papers call
    the width d_model. All layers are in one nn.Sequential, so that they can be cut
    into stages. Raises UserError if the heads cannot share the width.
    """

    def __init__(self, layers=12, width=768, heads=12, length=256, verbose=False):
        super().__init__()
        if width % heads:
            raise UserError(
                f"a width of {width} cannot be split over {heads} heads: use "
                f"--width {-(-width // heads) * heads}"
            )
        self.verbose = verbose
        if verbose:
            self.register_forward_pre_hook(hello)
        blocks = [Block(width, heads) for _ in range(layers)]
        head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.layers = nn.Sequential(Embedding(width, length), *blocks, *head)

    def stages(self, numbers, count):
        """Return these of count stages of a pipeline, as an nn.ModuleList.

        Blocks are dealt out evenly. Stage 0 has the embedding, too, and the last one
        the head, whose logits it gives as (N * length, VOCABULARY).
        """
        blocks = len(self.layers) - 3  # besides the embedding, the norm and the head
        cuts = [0, *(1 + i * blocks // count for i in range(1, count)), None]
        layers = [*self.layers, nn.Flatten(0, 1)]
        parts = [nn.Sequential(*layers[cuts[i] : cuts[i + 1]]) for i in numbers]
        for part in parts if self.verbose else ():
            part.register_forward_pre_hook(hello)
        return nn.ModuleList(parts)

    def forward(self, tokens):
        return self.layers(tokens)


def hello(module, inputs):
    """Print which process and device gets what: for --verbose."""
    rank = os.environ.get("RANK")  # set by torchrun
    place = f"rank {rank} on {inputs[0].device}" if rank else inputs[0].device
    line = f"Hello from {place} with input size {tuple(inputs[0].shape)}\n"
    print(line, end="")  # in one piece, or processes' lines run together
