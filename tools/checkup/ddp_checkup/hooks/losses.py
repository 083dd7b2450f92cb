"""What a loss is made of: class weights, gathered tensors, and their labels."""

import re

import torch
from torch.distributed.tensor import DTensor

from ddp_checkup.hooks.loaders import MAX_BATCHES, next_label
from ddp_checkup.hooks.shared import checksums, contents, tensors_of, wrap
from ddp_checkup.record import record, state, user_line

# Collectives that gather a tensor: which argument that is
GATHERS = {"all_gather": 1, "all_gather_into_tensor": 1, "gather": 0}
MIN_GATHERED = 64  # elements of a tensor that is compared: no few numbers
# Nodes of autograd that make a mean: a loss that is multiplied then has another one
MEANS = re.compile("(Mse|Nll|SmoothL1|L1|Huber|BinaryCrossEntropy|Mean)\\w*Backward")
MAX_NODES = 10_000  # of autograd, in the graph of a loss
# Nodes of autograd that put tensors together, or one into another
JOINS = re.compile("Cat|Stack|CopySlices|IndexPut|Scatter|SelectScatter|Where")


def reset():
    record.class_weights = {}  # by line and label: checksum of the weights in a loss
    record.contrasts = {}  # by line: checksums of labels, one for each own sample
    record.given = {}  # by line: checksums of what this rank gave to be gathered
    record.scaled = False  # whether a loss is none of PyTorch's means itself
    record.gathers = False  # whether something with a gradient was gathered
    record.cut_off = None  # the line that gathers for a loss, where gradients end
    state.has_gathered = False  # since the last backward pass
    # Since the last backward pass: (line, number in autograd's order, node)
    state.gathered_nodes = []


def note_gather(name, values):
    """Note what a rank gives, and where its gradient came from."""
    state.has_gathered = True
    if name in GATHERS:
        note_given(values[GATHERS[name]])
    if name.startswith("all_gather") and torch.is_grad_enabled():
        nodes = [t.grad_fn for t in tensors_of(values) if t.grad_fn is not None]
        now = torch._C._autograd._get_sequence_nr()
        state.gathered_nodes += [(user_line(), now, node) for node in nodes]


def note_given(tensor):
    """Record what a rank gives to be gathered, but for weights and for numbers."""
    plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    of_all = record.given.setdefault(user_line(), [])
    if not plain or len(of_all) >= MAX_BATCHES:
        return
    weights = tensor.numel() in {record.elements, *state.parameter_sizes}
    has_values = tensor.is_floating_point() or tensor.dtype == torch.uint8
    if has_values and tensor.numel() >= MIN_GATHERED and not weights:
        of_all += contents(tensor)


def before_loss(name, values):
    scores, target = values[:2]
    if state.has_gathered and isinstance(scores, torch.Tensor) and scores.dim() == 2:
        of_all = record.contrasts.setdefault(user_line(), [])
        own, all_samples = scores.shape
        of_ranks = own > 0 and all_samples % (own * state.world) == 0
        if of_ranks and len(of_all) < MAX_BATCHES:
            of_all += contents(target)
    for weights in values[2:]:
        if isinstance(weights, torch.Tensor):
            note_class_weights(weights)


def note_class_weights(weights):
    if weights is not None and torch.is_grad_enabled() and state.steps < MAX_BATCHES:
        by_label = record.class_weights.setdefault(user_line(), {})
        by_label[next_label(state.epoch)] = checksums([weights])


def note_graph(loss):
    """Note the line that gathers what this loss is made of, if gradients end there.

    all_gather() is no part of autograd. So a rank puts its own tensor back among
    the gathered ones: then a node that joins tensors leads to it.
    """
    root = loss.grad_fn
    record.scaled |= root is None or not MEANS.match(root.name())
    if state.gathered_nodes and root is not None:
        record.gathers = True
        left, nodes = [root], {root}
        users = {gathered: set() for _, _, gathered in state.gathered_nodes}
        while left and len(nodes) < MAX_NODES:
            user = left.pop()
            for other, _ in user.next_functions:
                if other in users:
                    users[other].add(user.name())
                if other is not None and other not in nodes:
                    nodes.add(other)
                    left.append(other)
        for line, number, gathered in state.gathered_nodes:
            # What was gathered after the loss was made is for a metric.
            before = root._sequence_nr() >= number
            names = users[gathered]
            if before and names and not any(map(JOINS.match, names)):
                record.cut_off = record.cut_off or line
    state.gathered_nodes.clear()
    state.has_gathered = False


def install():
    for name in ("cross_entropy", "nll_loss"):
        wrap(torch.nn.functional, name, before=before_loss)
    with_weights = torch.nn.BCEWithLogitsLoss
    wrap(with_weights, "forward", lambda _, v: note_class_weights(v[0].pos_weight))
