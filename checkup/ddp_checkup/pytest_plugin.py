"""A fixture for pytest: `checkup("train.py")` fails the test with the report."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def checkup(tmp_path):
    """Return a function that runs a script with its options under the checkup."""

    def run(*words, n=2, options=()):
        file = tmp_path / "checkup.json"
        file.write_text("")
        command = [sys.executable, "-m", "ddp_checkup", f"-n{n}", f"--json={file}"]
        command += [*options, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            content = file.read_text()  # empty if there is no report
            rows = json.loads(content)["checks"] if content else []
            bad = [row for row in rows if row["state"] in ("error", "warning")]
            # pytest's summary shows the first line.
            lines = [f"{row['state']} {row['name']}: {row['text']}" for row in bad]
            text = "\n".join([*lines, done.stdout + done.stderr])
            pytest.fail(text, pytrace=False)

    return run
