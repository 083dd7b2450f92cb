"""Fetches data sets and weights, on a login node: compute nodes have no network.

    python -m common.download dogs-vs-cats vgg16

Data goes to DATADIR, or else to data/ here; weights go to torch.hub's folder. What
breaks off goes on at the next call (MNIST and CIFAR-100 begin anew). Nothing has its
name before it is whole.
"""

import hashlib
import io
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from common.cli import OptionParser, UserError
from common.data import CINIC_CLASSES, data_root, read_photo
from common.models import VGG16_URL, WEIGHTS

DOGS_VS_CATS_URL = (
    "https://download.microsoft.com/download/3/E/1/"
    "3E1C3F21-ECDB-4869-8368-6DEBA77B919F/kagglecatsanddogs_5340.zip"
)
CINIC_URL = "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz"
CINIC_MD5 = "6ee4d0c996905fe93221de577967a372"


def fetch(url, file, sha256="", md5=""):
    """Download url to this file, going on where an earlier call broke off.

    sha256, md5: what the checksum begins with. Raises UserError, and leaves no file
    of that name, if the server is out of reach or sends something else.
    """
    part = file.with_name(f"{file.name}.part")
    total = have = part.stat().st_size if part.exists() else 0
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            have *= reply.status == 206  # 200: all of it comes, from the start
            total = have + int(reply.headers["Content-Length"])
            with open(part, "ab" if have else "wb") as out:
                while block := reply.read(1 << 20):
                    have += out.write(block)
                    print(f"\r{file.name}: {have / total:.0%}", end="", flush=True)
        print()
    except (OSError, ValueError) as error:
        if getattr(error, "code", 0) != 416:  # 416: there is no more than we have
            raise UserError(f"{url}: {error}; try again on a login node") from None
    if part.stat().st_size < total:
        raise UserError(f"{url} broke off: type the same again, and it goes on")
    body = part.read_bytes()
    checksum = (hashlib.md5 if md5 else hashlib.sha256)(body, usedforsecurity=False)
    if not checksum.hexdigest().startswith(md5 or sha256):
        part.unlink()
        raise UserError(f"{url} came damaged: type the same again, or another --url")
    part.rename(file)


def dogs_vs_cats(url=DOGS_VS_CATS_URL):
    """Fetch the 25,000 photos into dogs-vs-cats/train-2000/SPLIT/KIND/."""
    target = data_root() / "dogs-vs-cats"
    archive, unpacking = target.with_suffix(".zip"), target.with_suffix(".unpacking")
    if target.exists():
        return print(f"{target} is there already")
    if not archive.exists():
        fetch(url, archive)
    shutil.rmtree(unpacking, ignore_errors=True)
    try:
        with zipfile.ZipFile(archive) as photos:
            for kind in ("Cat", "Dog"):
                unpack(photos, kind, unpacking / "train-2000")
    except (zipfile.BadZipFile, UserError) as error:
        archive.unlink()
        raise UserError(f"{url} is not the archive ({error}): try --url") from None
    unpacking.rename(target)
    archive.unlink()
    print(f"Unpacked to {target}")


def unpack(photos, kind, target):
    """Unpack PetImages/KIND/N.jpg of the zip file into the splits.

    In the order of their numbers, without the few that do not decode, 1,000 are for
    training, 500 for validation, and the rest for testing. Raises UserError if there
    is no rest.
    """
    folder, count = f"PetImages/{kind}/", 0
    names = [
        n for n in photos.namelist() if n.startswith(folder) and n.endswith(".jpg")
    ]
    for name in sorted(names, key=lambda name: int(Path(name).stem)):
        photo = photos.read(name)
        try:
            read_photo(io.BytesIO(photo), 150)
        except UserError:
            continue
        split = "train" if count < 1000 else "validation" if count < 1500 else "test"
        file = (
            target / split / f"{kind.lower()}s" / f"{kind.lower()}.{Path(name).name}"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(photo)
        count += 1
    print(f"{kind}: {count} of {len(names)} photos decode")
    if count <= 1500:
        raise UserError(f"{count} photos in {folder}")


def mnist(url=None, source=None):
    """Fetch MNIST into MNIST/raw/, or copy it from a folder that holds it.

    url: a mirror. Raises UserError, and leaves no MNIST/, if it is not whole.
    """
    from torchvision.datasets import MNIST  # slow to import

    if url:
        MNIST.mirrors = [url]
    by_torchvision(MNIST, "MNIST", source, "t*-ubyte", "raw")


def cifar100(url=None):
    """Fetch CIFAR-100 into cifar-100-python/, from another address if you give one.

    Raises UserError, and leaves no such folder, if it is not whole.
    """
    from torchvision.datasets import CIFAR100  # slow to import

    if url:
        CIFAR100.url = url
    by_torchvision(CIFAR100, "cifar-100-python")


def by_torchvision(dataset, name, source=None, pattern="*", folder=""):
    """Let a data set of torchvision's fetch and check itself; then it has its name.

    source: do not fetch, copy from here what has names of this pattern to folder.
    """
    target = data_root() / name
    unpacking = target.with_name(f"{name}.unpacking")
    if target.exists():
        return print(f"{target} is there already")
    try:
        if source:
            shutil.rmtree(unpacking, ignore_errors=True)
            (unpacking / name / folder).mkdir(parents=True)
            for file in Path(source).glob(f"**/{pattern}"):
                shutil.copy(file, unpacking / name / folder)
        for train in (True, False):  # checks that the files can be read
            dataset(unpacking, train=train, download=not source)
    except Exception as error:
        where = f"in {source}" if source else "to be had here, try on a login node"
        raise UserError(f"no whole {name} {where} ({error})") from None
    (unpacking / name).rename(target)
    shutil.rmtree(unpacking)
    print(f"Saved {target}")


def cinic(url=CINIC_URL):
    """Fetch the 270,000 images of CINIC-10 into CINIC/SPLIT/CLASS/."""
    target = data_root() / "CINIC"
    archive, unpacking = (
        target.with_suffix(".tar.gz"),
        target.with_suffix(".unpacking"),
    )
    if target.exists():
        return print(f"{target} is there already")
    if not archive.exists():
        fetch(url, archive, md5=CINIC_MD5)
    shutil.rmtree(unpacking, ignore_errors=True)
    print(f"Unpacking {archive}: 270,000 files, this takes minutes", flush=True)
    try:
        with tarfile.open(archive) as images:
            images.extraction_filter = getattr(tarfile, "data_filter", None)
            images.extractall(unpacking)
        for split in ("train", "valid", "test"):
            for name in CINIC_CLASSES:
                next((unpacking / split / name).glob("*.png"))
    except (tarfile.TarError, EOFError, StopIteration) as error:
        archive.unlink()
        kind = type(error).__name__
        raise UserError(f"{url} is not the archive ({kind}): try --url") from None
    except OSError as error:
        raise UserError(f"cannot unpack {archive}: {error}") from None
    unpacking.rename(target)
    archive.unlink()
    print(f"Unpacked to {target}")


def vgg16(url=VGG16_URL):
    """Fetch the ImageNet weights of VGG16; their name holds the checksum."""
    file = WEIGHTS["vgg16"]
    if file.exists():
        return print(f"{file} is there already")
    fetch(url, file, sha256=file.stem.split("-")[1])
    print(f"Saved {file}")


def main():
    names = {"dogs-vs-cats": dogs_vs_cats, "vgg16": vgg16, "MNIST": mnist}
    names |= {"cifar-100-python": cifar100, "CINIC": cinic}
    parser = OptionParser(__doc__)
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--url", help="fetch it from another address")
    args = parser.parse_args()
    for name in args.names:
        names[name](*[args.url] if args.url else [])


if __name__ == "__main__":
    main()
