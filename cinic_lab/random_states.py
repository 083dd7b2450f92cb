"""The random states of all ranks, which checkpoints hold."""

import torch
import torch.distributed as dist


def get_rank():
    """Return this process's rank, 0 if there is no process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def gather_from_ranks(value):
    """Return a list of all ranks' values, by rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def get_random_states(device):
    """Return this rank's random states: the CPU's and, if it has one, its GPU's."""
    if device.type == "cpu":
        return [torch.get_rng_state()]
    return [torch.get_rng_state(), torch.get_device_module(device).get_rng_state()]


def set_random_states(ranks, device):
    """Set this rank's random states, from those of each rank of the saved run.

    A rank that the saved run did not have keeps its own states.
    """
    if get_rank() < len(ranks):
        cpu, *gpu = ranks[get_rank()]
        torch.set_rng_state(cpu)
        if gpu and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(*gpu)
