"""A decoder-only transformer that predicts the next token of a sequence."""

import os

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

    def forward(self, tokens):
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Block(nn.Module):
    """Attention (none if heads is 0) and an MLP, each with a residual connection."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        if heads:
            self.norm = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width)
            self.proj = nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), *mlp)

    def forward(self, x):
        if self.heads:
            qkv = self.qkv(self.norm(x)).unflatten(-1, (self.heads, 3, -1))
            q, k, v = qkv.permute(3, 0, 2, 1, 4)  # (N, heads, length, head_width)
            # Causal: no token sees a later one.
            attended = scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Maps tokens (N, length) to logits of the next ones (N, length, VOCABULARY)."""

    def __init__(self, layers=12, width=768, heads=12, length=256, verbose=False):
        super().__init__()
        if heads and width % heads:
            problem = f"--width {width} is not divisible by --heads {heads}"
            raise UserError(f"{problem}; use --width {-(-width // heads) * heads}")
        if verbose:
            self.register_forward_pre_hook(print_input_size)
        blocks = [Block(width, heads) for _ in range(layers)]
        head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        self.layers = nn.Sequential(Embedding(width, length), *blocks, *head)

    def forward(self, tokens):
        return self.layers(tokens)


def print_input_size(module, inputs):
    """Print the rank, the device and the size of the input, for --verbose."""
    rank = os.environ.get("RANK")  # set by torchrun
    process = f"rank {rank} on {inputs[0].device}" if rank else inputs[0].device
    line = f"Hello from {process} with input size {tuple(inputs[0].shape)}\n"
    print(line, end="")  # one write, or the lines of several processes mix
