"""Attention over sequences that are split over the ranks, for context_parallel.py.

Ring attention: Liu et al. 2023, https://arxiv.org/abs/2310.01889. Each rank keeps
the queries of its tokens. Keys and values go round the ranks, and the next ones
arrive while a rank uses the current ones. Only the scores of one part are in memory.
No scores are saved for the backward pass, which calculates them again, as
FlashAttention does (Dao 2023, https://arxiv.org/abs/2307.08691, section 2.3).
"""

import torch
import torch.distributed as dist


def ring_attention(q, k, v):
    """Map queries, keys and values of this rank's tokens to new values, causally.

    All have the shape (N, heads, length, width). The ranks have parts of the same
    sequences, of equal length and in the order of ranks.
    """
    return RingAttention.apply(q, k, v)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        output = torch.zeros_like(q)
        log_sum = q.new_full((*q.shape[:-1], 1), -torch.inf)  # of exp(scores)
        for source, (keys, values) in all_parts(torch.stack((k, v))):
            if source > dist.get_rank():
                continue  # these tokens come later
            scores = get_scores(q, keys, source)
            part_sum = scores.logsumexp(-1, keepdim=True)
            part = (scores - part_sum).exp() @ values
            # The softmax over both: a mean of the results, weighted by their sums.
            both = torch.logaddexp(log_sum, part_sum)
            output = output * (log_sum - both).exp() + part * (part_sum - both).exp()
            log_sum = both
        ctx.save_for_backward(q, k, v, output, log_sum)
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, log_sum = ctx.saved_tensors
        rank, dq, travelling = dist.get_rank(), torch.zeros_like(q), None
        # The softmax's gradient is weights * (dweights - their weighted mean).
        mean = (grad * output).sum(-1, keepdim=True)
        for source, kv in all_parts(torch.stack((k, v))):
            (keys, values), dkv = kv, torch.zeros_like(kv)
            if source <= rank:
                weights = (get_scores(q, keys, source) - log_sum).exp()
                dscores = weights * (grad @ values.mT - mean) * q.shape[-1] ** -0.5
                dq += dscores @ keys
                dkv[0], dkv[1] = dscores.mT @ q, weights.mT @ grad
            # Their gradients follow keys and values round, back to their rank.
            if source == rank:
                home = dkv
            elif travelling is None:
                travelling = dkv
            else:
                travelling = receive(send_on(travelling)) + dkv
        if travelling is not None:
            home += receive(send_on(travelling))
        return dq, *home


def all_parts(kv):
    """Yield (source, keys and values) of all ranks' tokens, this rank's first."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(world_size):
        last = step == world_size - 1
        coming = None if last else send_on(kv)
        yield (rank - step) % world_size, kv
        kv = None if last else receive(coming)


def get_scores(q, keys, source):
    """Return the scores (N, heads, queries, keys): -inf where a key comes later."""
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    if source < dist.get_rank():  # all of these keys come earlier
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf)


def send_on(tensor):
    """Begin to send a tensor to the next rank; return what receive() waits for."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    to_next = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    from_last = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    return received, dist.batch_isend_irecv([to_next, from_last])


def receive(coming):
    """Return the previous rank's tensor once it has arrived."""
    received, works = coming
    for work in works:
        work.wait()
    return received
