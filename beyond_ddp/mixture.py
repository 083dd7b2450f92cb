"""A mixture of experts that live on different ranks, for experts.py.

Switch Transformer: Fedus et al. 2021, https://arxiv.org/abs/2101.03961. A router
chooses one expert per token. The token travels to this expert's rank, and the result
travels back.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import one_hot

from common.errors import UserError


class Mixture(nn.Module):
    """Maps x (N, length, width) to the results of one expert per token.

    experts: this rank's experts, which experts.py adds. balance: the load-balancing
    loss of the last batch. Raises UserError if the ranks cannot share the experts.
    """

    def __init__(self, args, world_size):
        super().__init__()
        if args.experts % world_size:
            line = f"{args.experts} experts cannot be shared by {world_size} GPUs"
            raise UserError(f"{line}; use --experts {world_size * 4}")
        self.router = nn.Linear(args.width, args.experts)
        self.args = args

    def forward(self, x):
        tokens, num_experts = x.flatten(0, 1), self.args.experts
        probabilities = self.router(tokens).softmax(-1)  # (tokens, experts)
        probability, choice = probabilities.max(-1)

        # How many tokens each rank has for each expert (ranks, experts).
        own = one_hot(choice, num_experts).sum(0, keepdim=True)
        counts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, own)
        counts = torch.cat(counts)
        share = counts.sum(0) / counts.sum()  # of each expert, in all ranks' tokens
        self.balance = num_experts * share @ probabilities.mean(0)

        sent, limit = counts, None  # without --capacity: all
        if self.args.capacity:
            limit = math.ceil(self.args.capacity * len(tokens) / num_experts)
            sent = counts.clamp(max=limit)
        self.busiest, self.dropped = share.max(), 1 - sent.sum() / counts.sum()

        # all_to_all needs sizes on the CPU: here a layer waits for its GPU, once.
        counts, sent = torch.stack((counts, sent)).cpu()
        order = choice.argsort(stable=True).split(counts[dist.get_rank()].tolist())
        order = torch.cat([indices[:limit] for indices in order])  # sorted by expert

        results = self.ask_experts(tokens[order], sent)
        # Dropped tokens keep zeros, which the block adds to its input.
        output = torch.zeros_like(tokens).index_copy(0, order, results)
        return (output * probability[:, None]).view_as(x)

    def ask_experts(self, tokens, counts):
        """Return the experts' results for this rank's tokens, sorted by expert.

        counts (ranks, experts): how many tokens each rank sends to each expert.
        """
        rank, world_size, count = dist.get_rank(), len(counts), len(self.experts)
        counts = counts.view(world_size, world_size, count)  # from, to, expert there
        to_ranks = counts[rank].sum(1).tolist()
        from_ranks = counts[:, rank].sum(1).tolist()
        arrived = AllToAll.apply(tokens, to_ranks, from_ranks)

        # Rank 0's tokens for each expert here, then rank 1's, and so on.
        sizes = counts[:, rank].flatten().tolist()
        pieces = [*arrived.split(sizes)]
        for e, expert in enumerate(self.experts):
            results = expert(torch.cat(pieces[e::count]))
            pieces[e::count] = results.split(sizes[e::count])
        return AllToAll.apply(torch.cat(pieces), from_ranks, to_ranks)


class AllToAll(torch.autograd.Function):
    """Sends rows to all ranks; in the backward pass, their gradients come back.

    to_ranks, from_ranks: how many rows go to each rank and come from each rank.
    """

    @staticmethod
    def forward(ctx, rows, to_ranks, from_ranks):
        ctx.to_ranks, ctx.from_ranks = to_ranks, from_ranks
        arrived = rows.new_empty(sum(from_ranks), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), from_ranks, to_ranks)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.from_ranks, ctx.to_ranks), None, None


def make_experts(args, rank, world_size):
    """Return this rank's experts, each an MLP like model.Block's.

    Every rank draws the weights of all experts with the same seed, and keeps its
    part. So no two experts are equal, and none depends on the number of ranks.
    """
    width, count = args.width, args.experts // world_size
    experts = [
        nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        for _ in range(args.experts)
    ]
    return nn.ModuleList(experts[rank * count : (rank + 1) * count])


def find_mixtures(model):
    """Return the model's mixtures, from the first layer to the last."""
    return [module for module in model.modules() if isinstance(module, Mixture)]


def balance_loss(model):
    """Return the sum of the layers' losses, each 1 if balanced, times --balance."""
    layers = find_mixtures(model)
    return sum(layer.balance * layer.args.balance for layer in layers)


def describe_load(model):
    """Return a line on the last batch: busiest expert and dropped tokens."""
    busiest = max(layer.busiest.item() for layer in find_mixtures(model))
    dropped = max(layer.dropped.item() for layer in find_mixtures(model))
    return f"Last batch: busiest expert {busiest:.1%}, dropped tokens {dropped:.1%}"
