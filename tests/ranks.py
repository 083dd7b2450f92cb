"""fork_ranks.Run for cinic_lab, for test_checkpoint.py and test_requeue.py."""

import fork_ranks


def Run(folder, datadir, script, *options, **how):
    return fork_ranks.Run(folder, datadir, f"cinic_lab/{script}", *options, **how)
