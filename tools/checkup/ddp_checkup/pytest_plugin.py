"""A fixture for pytest: `checkup("train.py")` fails with the report."""

import subprocess
import sys

import pytest


@pytest.fixture
def checkup():
    """Return a function that runs a script with its options under the checkup."""

    def run(*words, n=2, options=()):
        command = [sys.executable, "-m", "ddp_checkup", f"-n{n}", *options]
        command += map(str, words)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.fail(done.stdout + done.stderr, pytrace=False)

    return run
