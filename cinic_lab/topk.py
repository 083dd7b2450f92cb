"""Which answers are right: the best one, or one of the best five."""


def top1_top5(scores, labels):
    """Return which labels (N,) have the best score, and which one of the best five.

    scores: (N, classes). Two bool tensors (N,).
    """
    hits = scores.topk(5).indices == labels[:, None]
    return hits[:, 0], hits.any(dim=1)
