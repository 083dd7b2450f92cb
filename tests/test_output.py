"""OUTPUT.md of each lesson shows what its scripts print. To write the pages anew:

RECORD=1 .venv/bin/python -m pytest -m weekly -n 0 tests/test_output.py
"""

import os
import re
import subprocess

import pytest
from conftest import REPOSITORY, copy_checkout, make_data, path_without_sbatch

SECTION = re.compile(
    r"(?<=^## )([^\n]+)\n\n```bash\n(.*?)\n```\n\n```text\n(.*?)```", re.M | re.S
)
SECTIONS = [
    pytest.param(page, *found, id=f"{page.parent.name}/{found[0]}")
    for page in sorted(REPOSITORY.glob("*/OUTPUT.md"))
    for found in SECTION.findall(page.read_text())
]
# "..." stands for what differs from run to run: times, speeds, memory and names.
UNITS = r"[\d.,]+(?= (s|ms|images/s|tokens/s|GB)\b)"
NAMES = r"(\b(Time|Data|milliseconds|ms|GB|host) |DEVICES: |offline-run-)[\w.-]+"
# Warnings, the names of profiles, and tracebacks but for the line with the error.
LEFT_OUT = r"\[rank\d+\]:?( {2,}|W|: Traceback)|.*Warning: | {2}|Traceback"
LEFT_OUT += "|Wrote profile|Inspect results|To view|python -m line_profiler|$"
FIRST, LAST = 10, 10  # lines of a longer output


@pytest.fixture(scope="module")
def datadir(tmp_path_factory):
    """Return a DATADIR with all that sample_data.py makes."""
    return make_data(tmp_path_factory.mktemp("data"), 1)


def shorten(output):
    output = re.sub(NAMES, r"\1...", re.sub(UNITS, "...", output))
    lines = [line for line in output.splitlines() if not re.match(LEFT_OUT, line)]
    if len(lines) > FIRST + LAST + 1:
        lines[FIRST:-LAST] = ["..."]
    return "".join(line.rstrip() + "\n" for line in lines)


def without_numbers(output):
    """Leave out what differs between machines, such as whether they have bfloat16.

    Which rank is the first to report an error differs from run to run.
    """
    output = re.sub(r"^\[rank.*\n", "", output, flags=re.M)
    return re.sub(r"-?\d[\d.,]*(e[+-]\d+)?|\.\.\.|torch.bfloat16|None", "N", output)


@pytest.mark.weekly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page, script, commands, shown", SECTIONS)
def test_a_script_prints_what_is_shown(
    page, script, commands, shown, datadir, tmp_path
):
    if "tensorflow" in script and not (REPOSITORY / ".venv-tensorflow").exists():
        pytest.skip("no TensorFlow: make venv-tensorflow")
    copy = copy_checkout(tmp_path / "repository")
    env = {"HOME": str(tmp_path), "TERM": "dumb", "CUDA_VISIBLE_DEVICES": "-1"}
    env |= {"PATH": path_without_sbatch(tmp_path / "bin"), "DATADIR": str(datadir)}
    # What bash and env.sh say of a missing terminal and Slurm is not the script's.
    typed = ["bash", "-ic", f"source common/env.sh; exec 2>&1; {commands}"]
    done = subprocess.run(
        typed,
        cwd=copy / page.parent.name,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    printed = done.stdout.replace(str(copy), "...").replace(str(datadir), "...")
    printed = shorten(printed)
    if os.environ.get("RECORD"):
        recorded = f"{script}\n\n```bash\n{commands}\n```\n\n```text\n{printed}```"
        text = SECTION.sub(
            lambda found: recorded if found[1] == script else found[0],
            page.read_text(),
        )
        page.write_text(text)
    else:
        assert without_numbers(printed) == without_numbers(shown)
