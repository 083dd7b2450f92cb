"""The rest of an epoch that was stopped: its batches, and its random numbers."""

import torch
from torch.utils.data import DataLoader


def random_states(device):
    """Return what this process draws next: the loader's order, and on its device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states, device):
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"], device)


class Rest:
    """A loader's batches, without those that were done before a stop."""

    def __init__(self, loader, state):
        self.loader, self.state = loader, state

    def __len__(self):  # all batches of an epoch
        return len(self.loader)

    def __iter__(self):
        loader, done = self.loader, self.state.so_far[0]
        numbers = list(loader.batch_sampler)[done:]  # of images: none is loaded yet
        how = {"collate_fn": loader.collate_fn, "pin_memory": loader.pin_memory}
        batches = iter(DataLoader(loader.dataset, batch_sampler=numbers, **how))
        if done:  # a loader draws a random number when it begins
            set_random_states(self.state.random, self.state.device)
        return batches
