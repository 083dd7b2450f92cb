"""Shared fixtures and helpers: sample data, copies of exercises, commands."""

import fcntl
import importlib
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PATHS = ("", "bench", "tools", "tools/predict")
sys.path[:0] = [str(REPOSITORY / folder) for folder in PATHS]
# The same on every machine: CPU cores, no job around, nobody's own settings.
AROUND = "SLURM_ SBATCH_ TORCH PET_ DDP_ NCCL_ GLOO_ MASTER_ RANK LOCAL_ WORLD_"
AROUND += " GROUP_ GPUS NODES SITE FRAMEWORK SMALL DATADIR MALLOC_ LINE_PROFILE"
for variable in [v for v in os.environ if v.startswith(tuple(AROUND.split()))]:
    del os.environ[variable]
# By the second one env.sh sees no driver, also where a test sets the first.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1"}
os.environ |= HIDDEN | {"OMP_NUM_THREADS": "1", "SMALL": "0"}  # options of their own
path = [str(REPOSITORY / "tests/no_load"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
QUICK = ("--backbone", "tinyvgg", "--epochs", "1", "--finetune-epochs", "1")
WITH_DATA = ("exercise8", "mnist_multigpu", "cifar100_demo", "cinic_lab")
EXERCISES = (*WITH_DATA, "dp_ddp_intro", "beyond_ddp", "clinic")
loaded = {exercise: {} for exercise in EXERCISES}


def pytest_collection_modifyitems(items):
    """Start the longest tests first, since one worker runs each of them."""
    items.sort(key=lambda item: "test_readmes" not in item.nodeid)


def pytest_runtest_logreport(report):
    """Print each failure at once, not only at the end."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)


def load(exercise, name):
    """Import a module of an exercise; others have modules of the same name."""
    folders = {str(REPOSITORY / other) for other in loaded}
    for other, module in list(sys.modules.items()):
        if os.path.dirname(getattr(module, "__file__", None) or "") in folders:
            del sys.modules[other]
    sys.modules |= loaded[exercise]
    folder = str(REPOSITORY / exercise)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        for other, module in sys.modules.items():
            if os.path.dirname(getattr(module, "__file__", None) or "") == folder:
                loaded[exercise][other] = module


def call(module, *options):
    """Run a module like `python MODULE.py OPTIONS`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *map(str, options)])
        module.main()


@contextmanager
def raises_user_error(words):
    """Expect a UserError in one line with these words."""
    from common.errors import UserError

    with pytest.raises(UserError, match=words) as error:
        yield
    assert "\n" not in str(error.value), error.value


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def fails(done, *words):
    """Check that a user error ended it: status 2, one line with these words.

    Each rank may print it.
    """
    assert done.returncode == 2 and done.stdout == "", done.stderr
    (line,) = {*done.stderr.splitlines()}
    assert line.startswith("Error: ")
    for word in words:
        assert word in line


@pytest.fixture
def fake_gpus(monkeypatch):
    """Return a function that makes PyTorch see fake GPUs with these functions."""
    import torch

    def fake(count=1, kind="cuda", **functions):
        device, gpu = torch.device(kind), torch.accelerator
        module = SimpleNamespace(is_available=lambda: True, chosen=[], **functions)
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(gpu, "current_accelerator", lambda **_: device)
        monkeypatch.setattr(gpu, "device_count", lambda: count)
        monkeypatch.setattr(gpu, "set_device_index", module.chosen.append)
        return module

    return fake


def make_data(folder, scale, exercises=WITH_DATA):
    for exercise in exercises:
        call(load(exercise, "sample_data"), "--to", folder, "--scale", scale)
    return folder


@pytest.fixture(scope="session")
def sample(tmp_path_factory):
    """Return a DATADIR with 40 photos to train on, 20 to validate, 120 to test."""
    return make_data(tmp_path_factory.mktemp("sample"), 0.1)


def copy_exercise(exercise, folder):
    """Copy an exercise, with links to the other folders; return the copy."""
    for other in {"common", "bench", "tools", "checkup"} - {exercise}:
        if not (folder / other).exists():
            (folder / other).symlink_to(REPOSITORY / other)
    ignored = shutil.ignore_patterns("logs*", "__pycache__", "mnist_cnn.pt", "*.tar")
    return shutil.copytree(
        REPOSITORY / exercise, folder / exercise, symlinks=True, ignore=ignored
    )


def copy_checkout(target):
    """Copy the files that git knows, link the environments, and return the copy."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=REPOSITORY, text=True)
    for name in filter(None, names.split("\0")):
        if os.path.lexists(REPOSITORY / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name, follow_symlinks=False)
    for name in (".venv", ".venv-tensorflow"):
        (target / name).symlink_to(REPOSITORY / name)
    return target


@pytest.fixture
def exercise(tmp_path):
    return copy_exercise("exercise8", tmp_path)


def run(command, folder, datadir="", timeout=300, **env):
    """Run a command in a folder as a user would; return the finished process."""
    env = {**os.environ, "DATADIR": str(datadir), **env}
    options = {"capture_output": True, "text": True, "timeout": timeout}
    command = [str(word) for word in command]
    return subprocess.run(command, cwd=folder, env=env, **options)


def on_terminal(command, folder, datadir="", stop_at=None):
    """Run it on a terminal; return status and output. stop_at: then type Ctrl-C."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ["DATADIR"] = str(datadir)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # "&" may have had it ignored
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    shown = ""
    while True:
        try:
            shown += os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # Linux's way to say that the other side is closed
            break
        if stop_at and stop_at in shown:
            os.write(terminal, b"\x03")
            stop_at = None
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), shown


def torchrun(processes, command, folder, datadir="", **env):
    """Run a script under our torchrun with this number of processes."""
    launch = [sys.executable, "-m", "common.torchrun", "--standalone"]
    launch.append(f"--nproc-per-node={processes}")
    return run([*launch, *command], folder, datadir, **env)


def path_without_sbatch(folder):
    """Return a PATH that has all of these commands except sbatch."""
    folder.mkdir()
    for place in filter(os.path.isdir, os.environ["PATH"].split(os.pathsep)):
        for name in {*os.listdir(place)} - {"sbatch", *os.listdir(folder)}:
            (folder / name).symlink_to(os.path.join(place, name))
    return str(folder)


@contextmanager
def serving(folder):
    """Serve the files of a folder; yield the address."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
