"""Random sequences of tokens with a pattern to learn, equal in all processes."""

import torch

from common.data import InMemoryDataset

VOCABULARY = 256


def random_sequences(count, length, seed=0):
    """Return an InMemoryDataset of tokens (count, length) and the token after each.

    Each token has one successor, which follows it nine times out of ten; otherwise
    any token follows. A model that has learnt the successors reaches a loss of 0.9,
    while a uniform guess gives ln(256) = 5.5. The seed is fixed, so that all
    processes make the same data.
    """
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(VOCABULARY, generator=generator)
    noise = torch.rand(count, length + 1, generator=generator) < 0.1
    tokens = torch.randint(VOCABULARY, (count, length + 1), generator=generator)
    for i in range(1, length + 1):
        follows = successor[tokens[:, i - 1]]
        tokens[:, i] = torch.where(noise[:, i], tokens[:, i], follows)
    return InMemoryDataset(tokens[:, :-1], tokens[:, 1:])
