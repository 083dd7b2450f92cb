"""What the download_data.py of the exercises share. They run on a login node.

Data goes to DATADIR, or else to data/ in the repository. Nothing has its name before
it is whole.
"""

import hashlib
import http.client
import os
import shutil
import socket
import urllib.error
import urllib.request
from pathlib import Path

from torchvision.datasets import utils

from common.cli import OptionParser, UserError
from common.data import data_root, prepared_file
from common.prepare import bar, find_images, prepare, remedy


def download_options(doc):
    """Return the parser of a download_data.py: --from FOLDER and --url ADDRESS."""
    parser = OptionParser(doc)
    add, text = parser.add_argument, "where it is already; default: fetch it"
    add("--from", type=Path, metavar="FOLDER", dest="source", help=text)
    add("--url", metavar="ADDRESS", help="to fetch it from; default: its own site")
    return parser


def fetch(url, file, checksum="", *, algorithm="md5"):
    """Download url to this file, going on where an earlier call broke off.

    checksum: what it begins with, by an algorithm of hashlib. Raises UserError, and
    leaves no file of that name, if the server is out of reach or sends another one.
    """
    part = file.with_name(f"{file.name}.part")
    try:
        total = have = part.stat().st_size if part.exists() else 0
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            have *= reply.status == 206  # 200: all of it comes, from the start
            total = have + int(reply.headers["Content-Length"] or 0)  # if it tells
            size = {"total": total or None, "unit": "B", "unit_scale": 1}
            done = bar(None, file.name, initial=have, **size)
            part.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "ab" if have else "wb") as out, done:
                while block := reply.read(1 << 20):
                    done.update(out.write(block))
    except (OSError, ValueError, http.client.HTTPException) as error:
        if getattr(error, "code", 0) != 416:  # 416: there is no more than we have
            what = remedy(error, "try again on a login node")
            raise UserError(f"{url}: {error}; {what}") from None
    if part.stat().st_size < total:
        raise UserError(f"{url} broke off: type the same again, and it goes on")
    found = hashlib.new(algorithm, part.read_bytes(), usedforsecurity=False)
    if not found.hexdigest().startswith(checksum):
        part.unlink()
        raise UserError(f"{url} came damaged: type the same again, or another --url")
    part.rename(file)


def download_images(doc, name, raw, url, unpack, splits, classes, size, md5=""):
    """The command download_data.py: get image files, and prepare() them.

    They come from --from FOLDER, or are in DATADIR/name already, or are fetched.
    unpack(archive, folder) makes folder/SPLIT/CLASS/ of what is at url, and raises
    UserError if it is not there; the folder is then named DATADIR/name/raw.
    """
    parser = download_options(doc)
    text = "leave out images that cannot be read"
    parser.add_argument("--skip-bad", action="store_true", help=text)
    args = parser.parse_args()
    target, first = data_root() / name, (splits[0], classes[0])
    done = all(os.path.exists(prepared_file(target, s, size)) for s in splits)
    try:
        source = find_images(args.source or target, *first)
        if done and not (source and os.access(target, os.W_OK)):
            return print(f"{target} is there already")
        if not source and args.source:
            raise UserError(f"no {'/'.join(first)}/ in {args.source}: type another")
        if not source:
            fetch_and_unpack(args.url or url, target / raw, unpack, md5)
            source = find_images(target, *first)
        target.mkdir(parents=True, exist_ok=True)
        if not os.access(target, os.W_OK):
            what = f"cannot write in {target}: type `export DATADIR=FOLDER`, a"
            raise UserError(f"{what} folder of your own, and add --from {source}")
        wrote = prepare(
            source, target, splits, classes, size, skip_bad=args.skip_bad
        )
    except OSError as error:
        what = remedy(error, "choose another --from, or another DATADIR")
        where = error.filename or target
        raise UserError(f"{where}: {error.strerror}; {what}") from None
    print(f"{target} is {'ready' if wrote else 'there already'}")


def fetch_and_unpack(url, folder, unpack, md5):
    """Make a folder as download_images() says; raise UserError if that fails."""
    archive, part = folder.parent / Path(url).name, folder.with_suffix(".part")
    if not archive.exists():
        fetch(url, archive, md5)
    shutil.rmtree(part, ignore_errors=True)
    print(f"Unpacking {archive}", flush=True)
    try:
        unpack(archive, part)
    except Exception as error:  # archives may be odd in many ways
        shutil.rmtree(part, ignore_errors=True)
        if getattr(error, "errno", None):  # the disk's error, not the archive's
            raise
        archive.unlink()
        raise UserError(f"{url} is not the archive ({error}): try --url") from None
    part.rename(folder)
    archive.unlink()


def by_torchvision(doc, dataset, name, files, folder=""):
    """The command download_data.py for a data set that torchvision fetches.

    dataset: its class; name: of its folder, which gets this name when it is whole.
    With --from FOLDER these files are copied to folder in it, from the one place in
    FOLDER that has all of them.
    """
    args = download_options(doc).parse_args()
    target = data_root() / name
    unpacking = target.with_name(f"{name}.unpacking")
    if os.path.exists(target):
        return print(f"{target} is there already")
    shutil.rmtree(unpacking, ignore_errors=True)
    if args.url:  # one of them is what the class looks at
        dataset.url, dataset.mirrors = args.url, [args.url.rstrip("/") + "/"]
    try:
        if args.source:
            os.listdir(f"{args.source}/.")  # says if one may not look into it
            found = [file.parent for file in args.source.glob(f"**/{files[0]}")]
            found = [f for f in found if all((f / name).is_file() for name in files)]
            if len(found) != 1:
                raise ValueError(f"{len(found)} folders with {', '.join(files)}")
            (unpacking / name / folder).mkdir(parents=True)
            for file in files:
                shutil.copyfile(found[0] / file, unpacking / name / folder / file)
        socket.setdefaulttimeout(60)  # torchvision sets none
        utils.tqdm = lambda **of: bar(None, name, **of)  # its own is for terminals
        for train in (True, False):  # checks that the files can be read
            dataset(unpacking, train=train, download=not args.source)
        (unpacking / name).rename(target)
    except Exception as error:
        where = f"in {args.source}" if args.source else "here: try on a login node"
        where = remedy(error, where)
        raise UserError(f"no whole {name} {where} ({error})") from None
    finally:
        socket.setdefaulttimeout(None)
        shutil.rmtree(unpacking, ignore_errors=True)
    print(f"{target} is ready")
