"""A rank that is stopped, say by a disk that hangs: named, and the job ends."""

import re
import signal

import pytest
from test_faults import DDP, ROOMS, functions, launchers, with_fault


def stops():
    """Yield all scripts on one node, and all run scripts for two nodes."""
    for script in DDP:
        yield launchers(script.parts[0], "--standalone")[0], script
    for exercise in ROOMS:
        for launcher in launchers(exercise, "common/nodes.sh"):
            yield launcher, next(s for s in DDP if s.parent.name == exercise)


@pytest.mark.slow
@pytest.mark.parametrize("launcher, script", [*stops()], ids=str)
def test_a_stopped_rank_is_named_and_ends_the_job(
    launcher, script, tmp_path, sample
):
    where = "train" if "train" in functions(script) else "forward"
    fault = 1, where, signal.SIGSTOP
    limit = {"DDP_TIMEOUT": "15"}
    status, output = with_fault(launcher, script, *fault, tmp_path, sample, **limit)
    assert status == 1, output
    assert re.search(r"^no step for \d+ s: .*rank 1 does not answer$", output, re.M)
    last = r"^Error: no step for 1\d s, the time limit: .*rank 1 does not answer$"
    assert re.search(last, output, re.M) and "Traceback" not in output, output
