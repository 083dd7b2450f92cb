"""PyTorch's torchrun without its error report, since the failed rank has said why.

    python -m common.torchrun --standalone --nproc-per-node=2 SCRIPT.py [OPTIONS]

The status is that of the rank that failed. Plain `torchrun` works as well.
"""

import logging
import os
import signal
import socket
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def meet_at_loopback():
    """Return the option for ranks on one machine to meet at 127.0.0.1.

    By default they meet at the machine's name, which not every machine can resolve.
    Ends with status 2 if there is no 127.0.0.1: torchrun would try for minutes.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        print(
            f"Error: the processes cannot reach each other at 127.0.0.1 ({error}): "
            "as root, run `ip link set lo up`, or use a container that has it",
            file=sys.stderr,
        )
        sys.exit(2)
    return "--local-addr=127.0.0.1"


if __name__ == "__main__":
    logging.disable(logging.ERROR)
    arguments = sys.argv[1:]
    if "--standalone" in arguments:
        arguments.insert(0, meet_at_loopback())
    try:
        main(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status < 0:  # a signal ended it, so it said nothing
            print(f"Error: rank {rank}: {failure.message}", file=sys.stderr)
            status = 128 - status  # as a shell does
        os._exit(status)  # before srun's SIGTERM to all nodes changes it
    except SignalException as error:
        if error.sigval == signal.SIGTERM and "--standalone" not in arguments:
            # If a rank fails, srun sends it to all nodes. The job gets the highest
            # status, which must be that rank's, and nothing is left to say.
            os._exit(1)
        # Ctrl-C, or the terminal was closed
        name = signal.Signals(error.sigval).name
        print(f"Stopped: {error} ({name})", file=sys.stderr)
        os._exit(128 + error.sigval)
    except Exception as error:  # a node that cannot be reached
        print(f"torchrun: {error.__cause__ or error}", file=sys.stderr)
        os._exit(1)
