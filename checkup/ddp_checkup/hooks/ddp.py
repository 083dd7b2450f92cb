"""DDP and FSDP models.

wrap         a DDP model is made: model (its number), buffers (their names)
forward      a DDP model is called: model, training (whether with gradients)
backward     plain_mean (whether the loss is a mean of PyTorch's own)
shard        the first FSDP model is made
parallel     parallelize_module() is called
drawn alike  all ranks draw the same numbers for a DTensor, as they do on CPUs
join         ranks may make different numbers of steps
"""

import re

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves

from ddp_checkup.hooks import collectives, late, loops, steps
from ddp_checkup.hooks.checksums import is_dtensor
from ddp_checkup.hooks.wrapping import keep_out_of_graphs, number_in, wrap
from ddp_checkup.trace import trace, user_line

MEANS = re.compile("(Mse|Nll|SmoothL1|L1|Huber|BinaryCrossEntropy|Mean)\\w*Backward")
TAKES_MEAN = 1  # PyTorch's number for reduction="mean"
MAX_NODES = 8  # nodes of autograd to follow back from a loss


def reset():
    global seen, current, forward_step, backward_line, fsdp_root, joins, compiles
    seen = []  # DDP models
    current = None  # the DDP model of the last forward with gradients
    forward_step = None  # optimizer steps before that forward
    backward_line = None  # line of the last backward pass
    fsdp_root = None  # the outermost FSDP model, which calls its parts
    joins = False  # whether ranks may make different numbers of steps
    compiles = False  # whether torch.compile was called


def after_ddp(result, values):
    ddp = values[0]
    seen.append(ddp)
    named = dict(ddp.module.named_parameters())
    steps.names |= {id(p): name for name, p in named.items()}
    steps.synced |= {id(p) for p in named.values()}
    buffers = [name for name, _ in ddp.module.named_buffers()]
    trace.add(
        "wrap",
        line=user_line(),
        model=len(seen) - 1,
        buffers=buffers,
    )


def before_forward(name, values):
    global current, forward_step
    ddp, training = values[0], torch.is_grad_enabled()
    if training:
        current, forward_step = ddp, trace.step
        loops.leave_evaluation()
        loops.note_inputs(values[1:])
    if trace.step < steps.MAX_COMPARED:
        model = number_in(seen, ddp)
        trace.add("forward", line=user_line(), model=model, training=training)
    buffers = ddp.will_sync_module_buffers() and ddp.require_forward_param_sync
    syncs = training and ddp.require_backward_grad_sync
    if (buffers or syncs) and not joins:
        what = f"a DDP forward with{'' if training else 'out'} gradients"
        collectives.compare_order(what, collectives.members(ddp.process_group))


def after_forward(result, values):
    """Count the backward pass as a collective: its gradients wait for all ranks."""
    ddp, begun = values[0], []
    syncs = torch.is_grad_enabled() and ddp.require_backward_grad_sync

    def before_gradient(gradient):
        if not begun:
            begun.append(True)
            group = collectives.members(ddp.process_group)
            collectives.compare_order(
                "the backward pass of a DDP model", group, backward_line
            )

    if syncs and not joins:
        for output in tree_leaves(result):
            is_plain = isinstance(output, torch.Tensor) and not is_dtensor(output)
            if is_plain and output.requires_grad:
                output.register_hook(before_gradient)


def before_backward(name, values):
    global backward_line
    trace.passes += 1
    backward_line = user_line()
    loss = values[0] if values else None
    plain_mean = False
    if isinstance(loss, torch.Tensor) and not is_dtensor(loss) and loss.numel() == 1:
        trace.losses.append(loss.detach().reshape(()).clone())
        node = loss.grad_fn
        plain_mean = node is not None and bool(MEANS.match(node.name()))
        if node is not None and forward_step == trace.step:
            trace.loss_weight = weight_of(node)
    if trace.step < steps.MAX_COMPARED:
        trace.add("backward", line=backward_line, plain_mean=plain_mean)


def weight_of(node):
    """Return the weight of one target in a loss, or None if no count divides it.

    A script may multiply and divide a loss by numbers, such as a count of targets.
    cross_entropy() divides a mean by the count of targets that are not ignored. In a
    sum of losses, only the first loss is followed.
    """
    weight, counts = 1.0, False
    for _ in range(MAX_NODES):
        name, other = node.name(), getattr(node, "_saved_other", None)
        is_number = isinstance(other, torch.Tensor) and other.numel() == 1
        if name.startswith("NllLoss") and node._saved_reduction == TAKES_MEAN:
            unweighted = node._saved_weight is None
            return weight / node._saved_total_weight.detach() if unweighted else None
        if name.startswith("Div") and is_number:
            weight, counts = weight / other.detach().reshape(()), True
        elif name.startswith("Mul") and is_number:
            weight = weight * other.detach().reshape(())
        elif not name.startswith("Add"):
            break
        node = node.next_functions[0][0]
        if node is None:
            break
    return weight if counts else None


def unused_parameters(error):
    """Return the names of the parameters without a gradient, from DDP's error."""
    indices = re.findall("did not receive grad for rank \\d+: ([\\d ]+)", error)
    if not (current and indices):
        return []
    named = current.module.named_parameters()
    names = [name for name, p in named if p.requires_grad]
    return [names[int(i)] for i in indices[0].split()]


def before_fsdp_forward(module, inputs):
    global fsdp_root
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    if fsdp_root in (None, module):  # its parts are called later
        fsdp_root = module
        loops.note_inputs(inputs)


def after_fully_shard(result, values):
    for module in values[0] if isinstance(values[0], list) else values[:1]:
        if isinstance(module, nn.Module):
            module.register_forward_pre_hook(before_fsdp_forward)
    if not trace.of("shard"):
        trace.add("shard", line=user_line())


def after_parallelize(result, values):
    trace.add("parallel", line=user_line())


def after_rng_mesh(is_supported, values):
    """Note that all ranks draw the same numbers for a DTensor, as on CPUs."""
    if not is_supported:
        trace.add("drawn alike")


def after_join(result, values):
    global joins
    joins = True
    trace.add("join", line=user_line())


def before_compile(name, values):
    """Keep DDP's forward and the hooks out of graphs, but leave the model in."""
    global compiles
    if not compiles:
        compiles = True
        DDP.forward = torch.compiler.disable(DDP.forward, recursive=False)
        keep_out_of_graphs()


def install():
    wrap(DDP, "__init__", after=after_ddp)
    wrap(DDP, "forward", before_forward, after_forward, during="calling")
    wrap(torch.autograd, "backward", before=before_backward, during="calling")
    wrap(Join, "__init__", after=after_join)
    wrap(torch, "compile", before=before_compile)
    fsdp, tensor = "torch.distributed.fsdp", "torch.distributed.tensor"
    for name in ("FullyShardedDataParallel.__init__", "fully_shard"):
        late.wrap_when_imported(fsdp, name, after=after_fully_shard)
    forward = "FullyShardedDataParallel.forward"
    late.wrap_when_imported(fsdp, forward, during="calling")
    late.wrap_when_imported(
        f"{tensor}.parallel", "parallelize_module", after=after_parallelize
    )
    late.wrap_when_imported(
        f"{tensor}._dispatch", "is_rng_supported_mesh", after=after_rng_mesh
    )
