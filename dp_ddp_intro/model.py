"""A small transformer that predicts the next token of a sequence."""

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
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x):
        # Queries, keys and values: (3, N, heads, length, width / heads).
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Causal: a token looks back, never ahead.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """From tokens (N, length) to logits (N, length, VOCABULARY) of what comes next.

    By default as large as GPT-2 but for its vocabulary: 12 layers of width 768, 85
    million parameters (https://huggingface.co/openai-community/gpt2). Papers call
    the width d_model. All layers are in one nn.Sequential, which model_parallel.py
    cuts in two. Raises UserError if the heads cannot share the width.
    """

    def __init__(self, layers=12, width=768, heads=12, length=256, verbose=False):
        super().__init__()
        if width % heads:
            raise UserError(
                f"a width of {width} cannot be split over {heads} heads: type "
                f"--width {-(-width // heads) * heads}"
            )
        self.verbose = verbose
        blocks = [Block(width, heads) for _ in range(layers)]
        head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.layers = nn.Sequential(Embedding(width, length), *blocks, *head)

    def forward(self, tokens):
        if self.verbose:
            size = tuple(tokens.shape)
            hello = f"Hello from {tokens.device} with input size {size}\n"
            print(hello, end="")  # in one piece, or processes' lines run together
        return self.layers(tokens)
