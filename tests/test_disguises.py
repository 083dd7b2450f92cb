"""A part of the tests, on a machine that looks like another one.

In each disguise tests failed at first: a GPU that PyTorch counts; and a Slurm job in
a folder with an odd name, in which nobody may write, without settings of git and of
the language. (.ci/run has a machine without Slurm.)
"""

import os
import subprocess
import sys

import pytest
from conftest import HIDDEN, REPOSITORY, copy_checkout

pytestmark = pytest.mark.slow
# Tests that start processes, count them, and read their output.
PART = "each_script_runs or kinds_of_gpu or missing_data or gpus_that_pytorch"
PART += " or malloc_is_tuned or small_options or user_error_of_all or strict_shell"
PART += " or only_in_a_shell"
FILES = "tests/test_common.py", "tests/test_run_scripts.py", "tests/test_faults.py"
JOB = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1", "SLURM_NNODES": "1"}
JOB |= {"SLURM_CPUS_PER_TASK": "3", "SLURM_RESTART_COUNT": "1", "GPUS": "3"}
JOB |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "SITE": "lumi"}


@pytest.mark.parametrize("disguise", ["GPU", "job in a folder"])
def test_the_tests_pass_on_another_machine(disguise, tmp_path):
    ours, checkout = {*HIDDEN, "PYTHONPATH"}, REPOSITORY
    env = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", PART, *FILES]
    command += ["-p", "no:cacheprovider", "--basetemp", tmp_path / "tests"]
    if disguise == "GPU":
        env["PYTHONPATH"] = str(REPOSITORY / "tests/disguise")
    else:  # nobody may write beside it, or read new files; cd says where it goes
        checkout = copy_checkout(tmp_path / "parent" / "a clone, à côté")
        (tmp_path / "parent").chmod(0o555)
        env |= JOB | {"CDPATH": ".", "LC_ALL": "C", "GIT_CONFIG_SYSTEM": "/dev/null"}
        command = ["sh", "-c", 'umask 077; exec "$@"', "sh", *command]
    done = subprocess.run(
        command,
        cwd=checkout,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
