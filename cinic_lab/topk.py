"""Top-1 and top-5 hits."""


def top1_top5(scores, labels):
    """Return two bool tensors (N,): label has the top score, is in the top five.

    scores: (N, classes); labels: (N,).
    """
    hits = scores.topk(5).indices == labels[:, None]
    return hits[:, 0], hits.any(dim=1)
