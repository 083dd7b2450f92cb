"""Downloads: what the download_data.py of all exercises share.

They run on a login node. Data goes to DATADIR, or else to data/ in the repository.
A file or folder gets its final name only when it is complete.
"""

import hashlib
import http.client
import os
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path

from common.checkpoint import check_writable
from common.cli import OptionParser, UserError
from common.data import data_root, prepared_file
from common.prepare import disk_full_hint, find_image_root, prepare, progress_bar


def download_options(doc):
    """Return a parser with the options --from FOLDER and --url ADDRESS."""
    parser = OptionParser(doc)
    add, text = parser.add_argument, "folder with the data (default: download it)"
    add("--from", type=Path, metavar="FOLDER", dest="source", help=text)
    text = "address to download from (default: the official site)"
    add("--url", metavar="ADDRESS", help=text)
    return parser


def fetch(url, file, checksum="", *, algorithm="md5"):
    """Download url to a file, and resume an earlier download that broke off.

    checksum: the first digits of its hash, by an algorithm of hashlib. Raises
    UserError, and leaves no file, if the server is unreachable or the hash differs.
    """
    part = file.with_name(f"{file.name}.part")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        total = have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            if reply.status != 206:  # the server sends all of it, not the rest
                have = 0
            total = have + int(reply.headers["Content-Length"] or 0)  # if known
            size = {"total": total or None, "unit": "B", "unit_scale": True}
            with (
                open(part, "ab" if have else "wb") as out,
                progress_bar(desc=file.name, initial=have, **size) as bar,
            ):
                while block := reply.read(1 << 20):
                    bar.update(out.write(block))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if getattr(error, "code", 0) != 416:  # 416: nothing is left to download
            what = disk_full_hint(error, "try again on a login node")
            raise UserError(f"{url}: {error}; {what}") from None
    if part.stat().st_size < total:
        raise UserError(f"{url} broke off: run the command again to resume")
    found = hashlib.new(algorithm, part.read_bytes(), usedforsecurity=False)
    if not found.hexdigest().startswith(checksum):
        part.unlink()
        raise UserError(f"{url} failed its checksum: run the command again")
    part.rename(file)


def download_images(doc, name, raw, url, unpack, splits, classes, size, md5=""):
    """Run the command download_data.py: get image files, and prepare() them.

    They come from --from FOLDER, from DATADIR/name, or from url. unpack(archive,
    folder) makes folder/SPLIT/CLASS/ of the downloaded archive; the folder then
    becomes DATADIR/name/raw. It raises an error if the archive is another one.
    """
    parser = download_options(doc)
    text = "drop images that cannot be read"
    parser.add_argument("--skip-bad", action="store_true", help=text)
    args = parser.parse_args()
    target, first = data_root() / name, (splits[0], classes[0])
    try:
        files = [prepared_file(target, split, size) for split in splits]
        if all(map(os.path.exists, files)) and not args.source:
            again = "delete its .pt files to prepare it again"
            print(f"{target} is there already; {again}")
            return
        source = find_image_root(args.source or target, *first)
        if not source and args.source:
            raise UserError(f"no {'/'.join(first)}/ in {args.source}: use another")
        if not source:
            fetch_and_unpack(args.url or url, target / raw, unpack, md5)
            source = find_image_root(target, *first)
        target.mkdir(parents=True, exist_ok=True)
        check_writable(files[0])
        prepare(source, target, splits, classes, size, skip_bad=args.skip_bad)
    except OSError as error:
        what = disk_full_hint(error, "choose another --from, or another DATADIR")
        where = error.filename or target
        raise UserError(f"{where}: {error.strerror}; {what}") from None
    print(f"{target} is ready")


def fetch_and_unpack(url, folder, unpack, md5):
    """Download and unpack url to a folder; raise UserError if that fails."""
    archive, part = folder.parent / Path(url).name, folder.with_suffix(".part")
    if not archive.exists():
        fetch(url, archive, md5)
    shutil.rmtree(part, ignore_errors=True)
    print(f"Unpacking {archive}", flush=True)
    try:
        unpack(archive, part)
    except Exception as error:  # a wrong archive can fail in many ways
        shutil.rmtree(part, ignore_errors=True)
        if getattr(error, "errno", None):  # the disk's error, not the archive's
            raise
        archive.unlink()
        raise UserError(f"{url} is not the archive ({error}): try --url") from None
    part.rename(folder)
    archive.unlink()


def download_torchvision(doc, dataset, name):
    """Run the command download_data.py for a data set of torchvision.

    dataset: its class; name: its folder. The data is copied from --from FOLDER, or
    downloaded.
    """
    args = download_options(doc).parse_args()
    target = data_root() / name
    unpacking = target.with_name(f"{name}.unpacking")
    if os.path.exists(target):
        print(f"{target} is there already")
        return
    shutil.rmtree(unpacking, ignore_errors=True)
    if args.url:  # a class uses one or the other
        dataset.url, dataset.mirrors = args.url, [args.url.rstrip("/") + "/"]
    socket.setdefaulttimeout(60)  # torchvision sets none
    try:
        if args.source:
            shutil.copytree(args.source / name, unpacking / name)
            # FOLDER may be read-only, and the copy is renamed.
            (unpacking / name).chmod(0o755)
        for train in (True, False):  # also checks that the files can be read
            dataset(unpacking, train=train, download=not args.source)
        (unpacking / name).rename(target)
    except Exception as error:
        what = "choose another --from" if args.source else "try on a login node"
        what = disk_full_hint(error, what)
        why = str(error) or type(error).__name__
        raise UserError(f"no complete {name} ({why}): {what}") from None
    finally:
        shutil.rmtree(unpacking, ignore_errors=True)
    print(f"{target} is ready")
