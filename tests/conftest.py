"""What the tests share: sample data, a copy of a room to run in, and how to run."""

import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
os.environ["OMP_NUM_THREADS"] = "1"
QUICK = ("--backbone", "tinyvgg", "--epochs", "1", "--finetune-epochs", "1")


def draw(folder, scale):
    command = [sys.executable, "-m", "common.sample_data", "--to", folder]
    subprocess.run([*command, "--scale", str(scale)], cwd=REPOSITORY, check=True)
    return folder


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """DATADIR with 64 images to train on, 20 to validate, 40 to test."""
    return draw(tmp_path_factory.mktemp("sample"), 0.1)


def copy_room(exercise, folder):
    """Copy an exercise, so that logs/ can be written; common/ is the real one."""
    (folder / "common").symlink_to(REPOSITORY / "common")
    ignored = shutil.ignore_patterns(
        "logs*", "__pycache__", "*.pt", "*.tar", "*.lprof"
    )
    return shutil.copytree(
        REPOSITORY / exercise, folder / exercise, symlinks=True, ignore=ignored
    )


@pytest.fixture
def room(tmp_path):
    return copy_room("exercise8", tmp_path)


def run(command, folder, datadir="", timeout=300, **env):
    """Run a command in a folder as a user would; return the finished process."""
    env = {**os.environ, "DATADIR": str(datadir), **env}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def torchrun(processes, command, folder, datadir="", **env):
    """Run a script under our torchrun as so many processes."""
    launch = [sys.executable, "-m", "common.torchrun", "--standalone"]
    launch.append(f"--nproc-per-node={processes}")
    return run([*launch, *command], folder, datadir, **env)


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def serving(folder):
    """Serve a folder's files, and give the address."""
    handler = partial(Handler, directory=folder)
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
