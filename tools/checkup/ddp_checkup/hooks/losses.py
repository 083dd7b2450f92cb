"""What a loss is made of: class weights, gathered tensors, and their labels."""

import re

import torch
from torch.distributed.tensor import DTensor

from ddp_checkup.hooks.loaders import MAX_BATCHES, next_label
from ddp_checkup.hooks.shared import checksums, contents, tensors_of, wrap
from ddp_checkup.record import record, state, user_line

# Collectives that gather a tensor: which argument that is
GATHERS = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,  # deprecated in PyTorch 2.14
    "all_gather_single": 1,
    "gather": 0,
}
MIN_GATHERED = 64  # elements of a tensor that is compared: no few numbers
# Nodes of autograd that make a mean: a loss that is multiplied then has another one
MEANS = re.compile("(Mse|Nll|SmoothL1|L1|Huber|BinaryCrossEntropy|Mean)\\w*Backward")
MAX_NODES = 10_000  # of autograd, in the graph of a loss
# Nodes of autograd that make one number of many: what is before them is no loss yet
REDUCTIONS = re.compile("Sum|Mean|Nll|LogSumExp|Dot|Norm|Max|Min|Amax|Amin")
# Nodes of autograd that choose some elements, such as those of no padding
CHOICES = re.compile("Index|MaskedSelect|Gather|Nonzero")
MAX_NEAR = 50  # nodes of autograd between a loss and what makes its parts
# Nodes of autograd that put tensors together, or one into another
JOINS = re.compile("Cat|Stack|CopySlices|IndexPut|Scatter|SelectScatter|Where")


def reset():
    record.class_weights = {}  # by line and label: checksum of the weights in a loss
    record.contrasts = {}  # by line: checksums of labels, one for each own sample
    record.given = {}  # by line: checksums of what this rank gave to be gathered
    record.scaled = False  # whether a loss is none of PyTorch's means itself
    record.gathers = False  # whether something with a gradient was gathered
    record.cut_off = None  # the line that gathers for a loss, where gradients end
    record.constant = None  # the same, where a part of the loss is a constant
    record.own_rows = None  # the same, for a loss of this rank's rows alone
    # By label, for each backward pass: (line, losses so far, parts of the loss); a
    # part is [count by which it was divided, factor, ...]
    record.divisors = {}
    state.given_at = ""  # since the last backward pass: what gathers many numbers
    state.has_gathered = False  # since the last backward pass
    state.has_own_rows = False  # whether a loss since then compares own with all
    # Since the last backward pass: (line, whether gradients were enabled, number in
    # autograd's order, node)
    state.gathered_nodes = []


def note_gather(name, values):
    """Note what a rank gives, and where its gradient came from."""
    state.has_gathered = True
    if name in GATHERS:
        note_given(values[GATHERS[name]])
    if name.startswith("all_gather"):
        nodes = [t.grad_fn for t in tensors_of(values) if t.grad_fn is not None]
        now = torch._C._autograd._get_sequence_nr()
        place = user_line(), torch.is_grad_enabled(), now
        state.gathered_nodes += [(*place, node) for node in nodes]


def note_given(tensor):
    """Record what a rank gives to be gathered, but for weights and for numbers."""
    plain = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    of_all = record.given.setdefault(user_line(), [])
    if not plain or len(of_all) >= MAX_BATCHES:
        return
    weights = tensor.numel() in {record.elements, *state.parameter_sizes}
    has_values = tensor.is_floating_point() or tensor.dtype == torch.uint8
    if has_values and tensor.numel() >= MIN_GATHERED and not weights:
        state.given_at = user_line() if torch.is_grad_enabled() else state.given_at
        of_all += contents(tensor)


def before_loss(name, values):
    scores, target = values[:2]
    if state.has_gathered and isinstance(scores, torch.Tensor) and scores.dim() == 2:
        of_all = record.contrasts.setdefault(user_line(), [])
        own, all_samples = scores.shape
        of_ranks = own > 0 and all_samples % (own * state.world) == 0
        # A sample may be compared with all others, but not with itself.
        but_one = own > 0 and (all_samples + 1) % (own * state.world) == 0
        state.has_own_rows |= of_ranks or but_one
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
    if root is not None and state.steps < MAX_BATCHES:
        has_constant = note_divisors(root)
        if has_constant and state.given_at:
            record.constant = record.constant or state.given_at
    if state.gathered_nodes and root is not None:
        record.gathers |= state.has_own_rows
        left, nodes = [root], {root}
        users = {gathered: set() for *_, gathered in state.gathered_nodes}
        while left and len(nodes) < MAX_NODES:
            user = left.pop()
            for other, _ in user.next_functions:
                if other in users:
                    own = hasattr(user, "_forward_cls")  # written in Python
                    users[other].add("own" if own else user.name())
                if other is not None and other not in nodes:
                    nodes.add(other)
                    left.append(other)
        for line, enabled, number, gathered in state.gathered_nodes:
            # What was gathered after the loss was made is for a metric.
            before = root._sequence_nr() >= number
            names = users[gathered] if before else ()
            if "own" in names:  # torch.distributed.nn.functional gathers in one
                continue
            record.gathers |= bool(names)
            put_back = any(map(JOINS.match, names))
            if names and not put_back and (enabled or state.has_own_rows):
                record.cut_off = record.cut_off or line
            elif put_back and state.has_own_rows:
                record.own_rows = record.own_rows or line
    state.gathered_nodes.clear()
    state.given_at = ""
    state.has_gathered = state.has_own_rows = False


def note_divisors(root):
    """Record the counts that make means of a loss's parts, each with its factors.

    root: the node of autograd that made the loss. Return whether a part of the loss
    has no gradient.
    """
    found, left, near, has_constant = [], [(root, [], [])], 0, False
    while left and near < MAX_NEAR:
        # above: what was found on the way from the root
        (node, factors, above), near = left.pop(0), near + 1
        name = node.name()
        count = count_of_mean(node, name)
        other = getattr(node, "_saved_other", None)
        if isinstance(other, torch.Tensor) and other.numel() == 1:
            if name.startswith("Div"):
                count = other
            elif name.startswith("Mul"):
                factors = [*factors, other]
                for part in above:
                    part.append(other)
        if count is not None:
            found.append([count, *factors])
            above = [*above, found[-1]]
        nodes = [other for other, _ in node.next_functions]
        if not REDUCTIONS.match(name):
            has_constant |= name.startswith("Add") and None in nodes
            left += [(other, factors, above) for other in nodes if other is not None]
    if found:
        copies = [[t.detach().reshape(()).clone() for t in part] for part in found]
        label = next_label(state.epoch)
        noted = user_line(), len(record.losses), copies
        record.divisors.setdefault(label, []).append(noted)
    return has_constant


def count_of_mean(node, name):
    """Return how many elements a node of autograd takes the mean of, or None.

    None also for a mean of all that it gets: padding is no part of what is counted.
    """
    takes_mean = 1  # PyTorch's number for reduction="mean"
    if name.startswith("NllLoss") and node._saved_reduction == takes_mean:
        return node._saved_total_weight if node._saved_weight is None else None
    before = node.next_functions[0][0] if name.startswith("Mean") else None
    if before is not None and CHOICES.match(before.name()):
        return torch.tensor(float(node._saved_self_sym_numel))
    return None


def install():
    for name in ("cross_entropy", "nll_loss"):
        wrap(torch.nn.functional, name, before=before_loss)
    with_weights = torch.nn.BCEWithLogitsLoss
    wrap(with_weights, "forward", lambda _, v: note_class_weights(v[0].pos_weight))
