"""Two ranks end as all scripts do, while Gloo's threads get hardly any CPU time.

    python gloo_exit.py ROUNDS

The scheduler runs idle threads last, so Python's end overtakes those of Gloo in
about half of the rounds. On a busy machine it does so in one of some hundred runs.
"""

import os
import sys
import tempfile

import torch
import torch._dynamo  # DDP imports it: so it is done once, and not in each round
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from common.errors import run


def main(rank, folder):
    global ddp_model  # as in a script without main(): it lives until Python's end
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    ddp_model = DDP(model, bucket_cap_mb=0.01)  # many buckets: much to free
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != os.getpid():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    for _ in range(5):
        ddp_model(torch.randn(16, 64)).square().mean().backward()
    dist.all_reduce(torch.zeros(3))
    dist.destroy_process_group()


for _ in range(int(sys.argv[1])):
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if not ranks[-1]:
                run(lambda: main(rank, folder))  # noqa: B023 (each fork has its own)
                sys.exit()
        print(*[os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])
