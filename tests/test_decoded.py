"""Images are decoded once, whoever asks, and whatever happens meanwhile."""

import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import run
from PIL import Image
from ranks import server

from common import data, decoded
from common.cli import UserError


@pytest.fixture
def files(tmp_path):
    """300 images in two folders, each of one colour of its own."""
    files = []
    for i in range(300):
        file = tmp_path / f"data/{'ab'[i // 150]}" / f"{i:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i % 256, i // 256, 7)).save(file)
        files.append(file)
    return files


@pytest.fixture
def keep(tmp_path):
    return [tmp_path / "keep", tmp_path / "else"]


def right(images, count=300):
    numbers = images[:, 0, 0, 0].int() + 256 * images[:, 1, 0, 0].int()
    return numbers.tolist() == list(range(count)) and bool((images[:, 2] == 7).all())


def get(files, keep, read=data.read_photo):
    return decoded.decoded("set-train", files, 8, read, keep)


def names(folder):
    return sorted(path.name.split("-")[-1][:4] for path in folder.iterdir())


def test_decoded_once_and_mapped(files, keep, capsys):
    images = get(files, keep)
    assert images.shape == (300, 3, 8, 8) and right(images)
    assert capsys.readouterr().out.count("Decoding 300 images, once") == 1
    again = get(files, keep, read=None)
    assert torch.equal(images, again) and capsys.readouterr().out == ""
    (file,) = (keep[0]).glob("set-train-*")
    assert file.stat().st_size == 300 * 3 * 8 * 8 and not keep[1].exists()
    assert str(file) in Path("/proc/self/maps").read_text()
    again[0] = 99  # a script's own business: the file stays as it is
    assert right(get(files, keep, read=None))


def test_a_set_that_changed_is_decoded_again(files, keep):
    get(files, keep)
    more = files[0].parent / "999.png"
    Image.new("RGB", (8, 8)).save(more)
    assert len(get([*files, more], keep)) == 301
    assert len(list(keep[0].glob("set-train-*"))) == 1  # and the old one is gone
    (decoded_file,) = keep[0].glob("set-train-*")
    decoded_file.write_bytes(b"cut")  # as by a disk that was full
    assert len(get([*files, more], keep)) == 301


def slowly(file, size):
    time.sleep(0.002)
    return data.read_photo(file, size)


def builder(files, keep, out, locks=True):
    if not locks:
        decoded.fcntl.flock = lock_fails
    with open(out, "w") as sys_stdout:
        os.dup2(sys_stdout.fileno(), 1)
        ok = right(get(files, keep, slowly))
    os._exit(0 if ok else 1)


def lock_fails(*args):
    raise OSError(37, "No locks available")


def start(files, keep, out, locks=True):
    process = server().Process(target=builder, args=(files, keep, out, locks))
    process.start()
    return process


@pytest.mark.parametrize("locks", [True, False])
def test_several_at_once(locks, files, keep, tmp_path):
    outs = [tmp_path / f"{i}.out" for i in range(3)]
    processes = [start(files, keep, out, locks) for out in outs]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    decodings = sum("Decoding" in out.read_text() for out in outs)
    assert decodings == 1 if locks else decodings >= 1
    assert not list(keep[0].glob("*.part"))


def test_a_killed_builder_leaves_no_lock_and_nothing_half(files, keep, tmp_path):
    process = start(files, keep, tmp_path / "out")
    deadline = time.monotonic() + 60
    while not list(keep[0].glob("*.part")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    waiting = start(files, keep, tmp_path / "second")
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (part,) = keep[0].glob(f"*-{process.pid}.part")
    waiting.join(60)
    assert waiting.exitcode == 0 and right(get(files, keep, read=None))
    os.utime(part, (0, 0))  # long ago
    get(files[:10], keep)  # the next that decodes tidies up
    assert not part.exists()


def test_no_space(files, keep):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot keep .*they take 0 MB"):
            get(files, keep)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(keep[0].glob("set-train-*"))
    assert right(get(files, keep))


def test_a_lock_that_cannot_be_had(files, keep):
    (keep[0] / "set-train.lock").mkdir(parents=True)  # as another user's file
    (keep[0] / "set-train-old").mkdir()  # nor can this be removed
    assert right(get(files, keep)) and right(get(files, keep, read=None))


@pytest.mark.parametrize("damage", [b"", b"text", "half", "middle"])
def test_a_damaged_image_is_one_line_and_nothing_is_left(damage, files, keep):
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    for kind in ("png", "jpg"):
        file = files[0].with_suffix(f".{kind}")
        Image.fromarray(noise).save(file)
        body = file.read_bytes()
        if damage == "half":
            body = body[: len(body) // 2]
        elif damage == "middle" and kind == "png":
            body = body[:41] + bytes(200) + body[241:]
        file.write_bytes(damage if isinstance(damage, bytes) else body)
        if damage == "middle" and kind == "jpg":
            continue  # wrong pixels, which nobody can tell
        with pytest.raises(UserError, match="is damaged") as error:
            get([file, *files[1:]], keep)
        assert "\n" not in str(error.value) and str(file) in str(error.value)
        assert not list(keep[0].glob("set-train-*"))


def test_where_it_can_be_written(files, keep):
    keep[0].write_text("a file, not a folder")
    assert right(get(files, keep)) and list(keep[1].glob("set-train-*"))
    shutil.rmtree(keep[1])
    keep[1].write_text("")
    with pytest.raises(UserError, match="neither"):
        get(files, keep)


def test_cinic(sample, monkeypatch):
    monkeypatch.setenv("DATADIR", str(sample))
    train, valid, test = data.cinic()
    assert [len(part) for part in (train, valid, test)] == [100, 20, 20]
    images, labels = train.__getitems__([0, 99])
    assert images.dtype == torch.uint8 and images.shape == (2, 3, 32, 32)
    assert labels.tolist() == [0, 9] and labels.dtype == torch.int64
    for i, name in ((0, "airplane/train-0.png"), (1, "truck/train-9.png")):
        pixels = np.asarray(Image.open(sample / "CINIC/train" / name))
        assert (images[i].permute(1, 2, 0).numpy() == pixels).all()
    assert (sample / ".decoded").is_dir()


def test_images_of_another_size_are_resized(tmp_path):
    Image.new("RGB", (50, 40), (9, 8, 7)).save(tmp_path / "odd.png")
    image = data.read_photo(tmp_path / "odd.png", 32)
    assert image.shape == (3, 32, 32) and image[:, 16, 16].tolist() == [9, 8, 7]


def test_the_folder_is_not_taken_for_data(sample, tmp_path):
    """Two runs, one after the other: the second one decodes nothing."""
    shutil.copytree(sample / "CINIC", tmp_path / "CINIC")
    script = "from common.data import cinic; print(len(cinic()[1]))"
    (tmp_path / "common").symlink_to(os.path.dirname(data.__file__))
    (tmp_path / "x.py").write_text(script)
    outputs = [
        run([sys.executable, "x.py"], tmp_path, tmp_path).stdout for _ in range(2)
    ]
    assert outputs[0].count("Decoding") == 3 and outputs[1] == "20\n"
