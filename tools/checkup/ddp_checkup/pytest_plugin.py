"""A fixture for pytest: `checkup("train.py")` fails with the report."""

import json
import subprocess
import sys

import pytest


@pytest.fixture
def checkup(tmp_path):
    """Return a function that runs a script with its options under the checkup."""

    def run(*words, n=2, options=()):
        file = tmp_path / "checkup.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "ddp_checkup", f"-n{n}", f"--json={file}"]
        command += [*options, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            rows = json.loads(file.read_text())["checks"] if file.exists() else []
            bad = [r for r in rows if r["state"] in ("error", "warning")]
            # pytest's summary shows the first line.
            findings = [f"{r['state']} {r['name']}: {r['text']}" for r in bad]
            text = "\n".join([*findings, done.stdout + done.stderr])
            pytest.fail(text, pytrace=False)

    return run
