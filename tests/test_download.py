"""download.py against a server on localhost that breaks off, lies, and resumes."""

import errno
import hashlib
import io
import os
import sys
import tarfile
import threading
import time
import zipfile
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import REPOSITORY, as_nobody, call, load, mistake, run
from PIL import Image

from common import download
from common.cli import UserError

PHOTOS = load("exercise8", "download_data")
WEIGHTS = load("exercise8", "download_weights")
CINIC = load("cinic_lab", "download_data")
MNIST = load("mnist_multigpu", "download_data")
CIFAR = load("cifar100_demo", "download_data")


@pytest.fixture
def server():
    """A server of .files, which .breaks off after some bytes and notes .ranges."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path in server.moved:
                self.send_response(302)
                self.send_header("Location", server.moved[self.path])
                return self.end_headers()
            if self.path not in server.files:
                return self.send_error(404)
            body, asked = server.files[self.path], self.headers.get("Range")
            start = int(asked.removeprefix("bytes=").split("-")[0])
            server.ranges.append(start)
            if not server.resumes:
                start = 0
            elif start >= len(body):
                return self.send_error(416)
            self.send_response(206 if server.resumes else 200)
            if server.tells_length is not False:
                told = server.tells_length
                told = len(body) - start if told is True else told
                self.send_header("Content-Length", str(told))
            self.end_headers()
            if server.silent:
                return time.sleep(2)
            stop = server.breaks.pop() if server.breaks else len(body)
            self.wfile.write(body[start : start + stop])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    server.files, server.breaks, server.ranges, server.resumes = {}, [], [], True
    server.tells_length, server.moved, server.silent = True, {}, False
    server.url = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def photos(cats=1505, dogs=1503):
    """A zip like Microsoft's, with small photos and two files that do not decode."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    photo, buffer = buffer.getvalue(), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for folder, count in (("Cat", cats), ("Dog", dogs)):
            archive.writestr(f"PetImages/{folder}/Thumbs.db", b"not a photo")
            for i in range(count):
                archive.writestr(
                    f"PetImages/{folder}/{i}.jpg", b"" if i == 666 else photo
                )
    return buffer.getvalue()


@pytest.mark.parametrize("resumes", [True, False])
def test_fetch_goes_on_where_it_broke_off(server, tmp_path, resumes):
    body = bytes(range(256)) * 10000
    server.files["/file"], server.breaks, server.resumes = body, [1000000], resumes
    with mistake(r"broke off: type the same again|IncompleteRead"):
        download.fetch(f"{server.url}/file", tmp_path / "file")
    assert not (tmp_path / "file").exists()
    sha256 = hashlib.sha256(body).hexdigest()
    download.fetch(
        f"{server.url}/file", tmp_path / "file", sha256[:8], algorithm="sha256"
    )
    assert (tmp_path / "file").read_bytes() == body
    assert server.ranges == [0, 1000000]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_fetch_of_what_is_complete_already(server, tmp_path):
    server.files["/file"] = b"all of it"
    (tmp_path / "file.part").write_bytes(b"all of it")
    download.fetch(f"{server.url}/file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"all of it"


def test_fetch_refuses_what_is_damaged(server, tmp_path):
    server.files["/file"] = b"something else"
    with mistake(r"damaged"):
        download.fetch(f"{server.url}/file", tmp_path / "file", "397923af")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["http://localhost:1/x", "nonsense", "{server}/none"]
)
def test_fetch_without_a_server(server, url, tmp_path):
    with mistake(r"login node"):
        download.fetch(url.format(server=server.url), tmp_path / "file")


def test_fetch_from_a_server_that_is_odd(server, tmp_path):
    server.files["/file"], server.tells_length = b"some", False
    with mistake("login node"):
        download.fetch(f"{server.url}/a file", tmp_path / "file")
    md5 = hashlib.md5(b"some").hexdigest()
    server.breaks = [2]  # nobody can know: it ends as a whole file does
    with mistake("came damaged"):
        download.fetch(f"{server.url}/file", tmp_path / "file", md5)
    assert list(tmp_path.iterdir()) == []
    download.fetch(f"{server.url}/file", tmp_path / "file", md5)
    assert (tmp_path / "file").read_bytes() == b"some"


@pytest.mark.parametrize("length", [-1, 10**30, "many", ""])
def test_fetch_from_a_server_that_lies_on_the_length(length, server, tmp_path):
    server.files["/file"], server.tells_length = b"some", length
    with suppress(UserError):  # a length of none or less is as if it told none
        download.fetch(f"{server.url}/file", tmp_path / "file", "not this")
    assert not (tmp_path / "file").exists()


def test_fetch_from_a_server_that_falls_silent(server, tmp_path, monkeypatch):
    server.files["/file"], server.silent = b"some", True
    urlopen = download.urllib.request.urlopen
    monkeypatch.setattr(
        download.urllib.request,
        "urlopen",
        lambda url, timeout: urlopen(url, timeout=1),
    )
    with mistake("timed out"):
        download.fetch(f"{server.url}/file", tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_fetch_is_sent_elsewhere(server, tmp_path):
    server.files["/file"] = b"some"
    secret = tmp_path / "secret"
    secret.write_text("of this machine")
    server.moved = {
        "/a": f"{server.url}/file",
        "/round": f"{server.url}/round",
        "/mine": secret.as_uri(),
        "/lost": f"{server.url}/none",
    }
    download.fetch(f"{server.url}/a", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"some"
    for address in ("/round", "/mine", "/lost"):
        with mistake("login node"):
            download.fetch(server.url + address, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full(number, server, tmp_path, monkeypatch):
    """While fetching, unpacking, preparing: what is there stays, and goes on."""
    full = OSError(number, os.strerror(number))

    class Full(io.BytesIO):
        def write(self, block):
            raise full

    def no_room(*args, **options):
        raise full

    monkeypatch.setenv("DATADIR", str(tmp_path))
    body = cinic_archive(load("cinic_lab", "dataset").CLASSES)
    server.files["/c.tar.gz"] = body
    url = f"{server.url}/c.tar.gz"
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    folder = tmp_path / "CINIC"
    with monkeypatch.context() as patch, mistake("the disk is full, make room"):
        patch.setattr(download, "open", lambda *args: Full(), raising=False)
        call(CINIC, "--url", url)
    with monkeypatch.context() as patch, mistake("the disk is full, make room"):
        patch.setattr(tarfile.TarFile, "makefile", no_room)
        call(CINIC, "--url", url)
    assert [path.name for path in folder.iterdir()] == ["c.tar.gz"]
    with monkeypatch.context() as patch, mistake(r"disk full\? make room"):
        patch.setattr("torch.save", no_room)
        call(CINIC, "--url", "http://localhost:1/c.tar.gz")  # it is here already
    assert [path.name for path in folder.iterdir()] == ["CINIC-10"]
    call(CINIC, "--url", "http://localhost:1/never")
    for exercise, name in (
        ("mnist_multigpu", "MNIST"),
        ("cifar100_demo", "CIFAR100"),
    ):
        module = load(exercise, "download_data")
        monkeypatch.setattr(getattr(module, name), "download", no_room)
        with mistake("the disk is full, make room"):
            call(module)
    assert [path.name for path in tmp_path.iterdir()] == ["CINIC"]


def test_dogs_vs_cats(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    server.files["/photos.zip"] = photos()
    call(PHOTOS, "--url", f"{server.url}/photos.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["dogs-vs-cats"]
    root = tmp_path / "dogs-vs-cats/train-2000"
    for split, cats, dogs in (
        ("train", 1000, 1000),
        ("validation", 500, 500),
        ("test", 4, 2),
    ):
        assert len(list((root / split / "cats").iterdir())) == cats
        assert len(list((root / split / "dogs").iterdir())) == dogs
    assert (root / "train/cats/cat.1000.jpg").exists()  # in place of 666
    assert not list(root.glob("*/*/*.666.jpg"))
    assert (root / "test/dogs/dog.1502.jpg").exists()
    assert sorted(path.name for path in root.parent.iterdir()) == [
        *("test-150.pt", "train-150.pt", "train-2000", "validation-150.pt")
    ]
    assert [len(part) for part in load("exercise8", "dataset").dogs_vs_cats()] == [
        *(2000, 1000, 6)
    ]
    call(PHOTOS, "--url", "http://localhost:1/never")
    assert "is there already" in capsys.readouterr().out


def damaged():
    """An archive that is whole but for the stream of a photo."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("PetImages/Cat/0.jpg", bytes(range(256)) * 100)
    body = bytearray(buffer.getvalue())
    body[60:70] = bytes(10)
    return bytes(body)


def odd(kind):
    """An archive with one photo that is encrypted, or packed in an odd way."""
    name = "PetImages/Cat/0.jpg"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(name, bytes(range(256)) * 9)
    body = bytearray(buffer.getvalue())
    entry = body.index(b"PK\1\2")
    if kind == "encrypted":
        body[6] |= 1
        body[entry + 8] |= 1
    elif kind == "unknown packing":
        body[8] = body[entry + 10] = 99
    elif kind == "damaged lzma":
        body[70:90] = bytes(20)
    elif kind == "another name":
        body[entry + 46] ^= 1
    elif kind == "long number":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(f"PetImages/Cat/{'9' * 5000}.jpg", b"")
        return buffer.getvalue()
    return bytes(body)


@pytest.mark.parametrize(
    "kind",
    ["encrypted", "unknown packing", "damaged lzma", "another name", "long number"],
)
def test_an_odd_archive_does_not_stay(kind, server, tmp_path, monkeypatch):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    server.files["/photos.zip"] = odd(kind)
    for _ in range(2):
        with mistake("not the archive"):
            call(PHOTOS, "--url", f"{server.url}/photos.zip")
        assert list((tmp_path / "dogs-vs-cats").iterdir()) == []
    assert server.ranges == [0, 0]


def bad_tar(kind):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo("train/cat/x.png")
        if kind == "above":
            member.name = "../../escaped.png"
        elif kind == "absolute":
            member.name = "/tmp/escaped-from-cinic.png"
        elif kind == "link":
            member.type, member.linkname = tarfile.SYMTYPE, "../../../../etc"
        elif kind == "device":
            member.type = tarfile.CHRTYPE
        archive.addfile(member)
    body = bytearray(buffer.getvalue())
    if kind == "sum":
        body[-8] ^= 1
    return bytes(body)


@pytest.mark.parametrize("kind", ["above", "absolute", "link", "device", "sum"])
def test_an_archive_that_would_write_elsewhere(kind, server, tmp_path, monkeypatch):
    datadir = tmp_path / "a/b"
    monkeypatch.setenv("DATADIR", str(datadir))
    body = server.files["/cinic.tar.gz"] = bad_tar(kind)
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    with mistake("not the archive"):
        call(CINIC, "--url", f"{server.url}/cinic.tar.gz")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert list((datadir / "CINIC").iterdir()) == []
    assert not os.path.exists("/tmp/escaped-from-cinic.png")


@pytest.mark.parametrize(
    "body",
    [b"<html>sorry</html>", photos()[:-500], photos(dogs=20), damaged()],
    ids=["page", "half", "few", "damaged"],
)
def test_what_is_not_the_archive_is_never_taken_for_data(
    server, body, tmp_path, monkeypatch
):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    server.files["/photos.zip"] = body
    with mistake(r"not the archive"):
        call(PHOTOS, "--url", f"{server.url}/photos.zip")
    (folder,) = tmp_path.iterdir()  # and in it nothing that looks like data
    assert {path.name for path in folder.iterdir()} <= {"train-2000.part"}
    server.files["/photos.zip"] = photos()
    call(PHOTOS, "--url", f"{server.url}/photos.zip")
    assert (tmp_path / "dogs-vs-cats/train-2000").exists()


def test_vgg16(server, tmp_path, monkeypatch):
    body = b"the weights"
    name = f"vgg16-{hashlib.sha256(body).hexdigest()[:8]}.pth"
    monkeypatch.setitem(WEIGHTS.WEIGHTS, "vgg16", tmp_path / "hub" / name)
    server.files["/weights"], server.breaks = body, [5]
    for _ in range(2):  # the first one breaks off
        with suppress(UserError):
            call(WEIGHTS, "--url", f"{server.url}/weights")
    assert (tmp_path / "hub" / name).read_bytes() == body
    assert server.ranges == [0, 5]
    call(WEIGHTS, "--url", "http://localhost:1/never")  # it is there already


@pytest.mark.parametrize("exercise", ["exercise8", "cifar100_demo"])
def test_the_command_without_a_network(exercise, tmp_path):
    command = [sys.executable, "download_data.py", "--url", "http://localhost:1/x"]
    done = run(command, REPOSITORY / exercise, tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "login node" in done.stderr and "Error: " in done.stderr
    assert list(tmp_path.iterdir()) == []


def cinic_archive(classes):
    """A tar.gz like Edinburgh's, with one tiny image of each class in each split."""
    buffer, image = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (32, 32)).save(image, "PNG")
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for folder in ("train", "valid", "test"):
            for name in classes:
                member = tarfile.TarInfo(f"./{folder}/{name}/cifar10-1.png")
                member.size = len(image.getvalue())
                archive.addfile(member, io.BytesIO(image.getvalue()))
        archive.addfile(tarfile.TarInfo("./README.md"))
    return buffer.getvalue()


def test_cinic(server, tmp_path, monkeypatch, capsys):
    dataset = load("cinic_lab", "dataset")
    body = cinic_archive(dataset.CLASSES)
    monkeypatch.setenv("DATADIR", str(tmp_path))
    server.files["/cinic.tar.gz"], server.breaks = body, [300, len(body)]
    url = "--url", f"{server.url}/cinic.tar.gz"
    with mistake("came damaged"):  # it is not Edinburgh's
        call(CINIC, *url)
    assert list((tmp_path / "CINIC").iterdir()) == []
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    with mistake(r"broke off|IncompleteRead"):
        call(CINIC, *url)
    assert [path.suffix for path in (tmp_path / "CINIC").iterdir()] == [".part"]
    call(CINIC, *url)  # goes on
    assert server.ranges == [0, 0, 300]
    assert sorted(path.name for path in (tmp_path / "CINIC").iterdir()) == [
        *("CINIC-10", "test-32.pt", "train-32.pt", "valid-32.pt")
    ]
    assert [len(part) for part in dataset.cinic()] == [10, 10, 10]
    call(CINIC, "--url", "http://localhost:1/never")
    assert "is there already" in capsys.readouterr().out


@pytest.mark.parametrize("body", [b"no archive", cinic_archive(["cat", "dog"])])
def test_what_is_not_cinic_is_never_taken_for_it(
    body, server, tmp_path, monkeypatch
):
    monkeypatch.setenv("DATADIR", str(tmp_path))
    monkeypatch.setattr(CINIC, "MD5", hashlib.md5(body).hexdigest())
    server.files["/cinic.tar.gz"] = body
    with mistake("not the archive"):
        call(CINIC, "--url", f"{server.url}/cinic.tar.gz")
    left = {path.name for path in (tmp_path / "CINIC").iterdir()}
    assert left <= {"CINIC-10.part"}
    with mistake(r"no data|not prepared"):
        load("cinic_lab", "dataset").cinic()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("what", ["source", "datadir", "weights"])
@pytest.mark.parametrize("mode", [0o000, 0o444])
def test_folders_without_the_right_to_enter(what, mode, public, monkeypatch):
    """One line says it, before anything goes over the network, or is called gone."""
    closed = public / "closed"
    for name in ("MNIST/raw", "CINIC", "cifar-100-python", "dogs-vs-cats"):
        (closed / name).mkdir(parents=True)
    closed.chmod(mode)
    inside = what == "datadir"
    monkeypatch.setenv("DATADIR", str(closed if inside else public / "mine"))
    monkeypatch.setitem(WEIGHTS.WEIGHTS, "vgg16", closed / "vgg16-1.pth")
    modules = [WEIGHTS] if what == "weights" else [PHOTOS, CINIC, MNIST, CIFAR]
    url = ("--url", "http://localhost:1/x")
    options = ("--from", closed) if what == "source" else url

    def as_student():
        for module in modules:
            with mistake("Permission denied"):
                call(module, *options)

    as_nobody(as_student)
    closed.chmod(0o755)
