"""Images decoded once, into one file, which all processes of a node then share."""

import fcntl
import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import torch

from common.cli import UserError

BLOCK = 256  # images decoded before they are written: some MB


def decoded(name, files, size, read, folders):
    """Return the images in these files as a uint8 tensor (N, 3, size, size).

    It is a mapped file, made by the first process that asks for it; others wait.
    Its name tells what it was made of: the split (name), the folders of the files,
    when these last changed, and the size. So what has changed is decoded again.
    read(file, size) returns one image, or raises UserError if it is damaged.
    folders: where to look for the file; it is made in the first that can be written
    to. Raises UserError if there is none, or no space.
    """
    sources = sorted({file.parent for file in files})
    made_of = [(str(path.resolve()), path.stat().st_mtime_ns) for path in sources]
    made_of = repr((made_of, len(files), size)).encode()
    file_name = f"{name}-{hashlib.sha256(made_of).hexdigest()[:16]}"
    length = len(files) * 3 * size * size
    for file in (folder / file_name for folder in folders):
        if is_whole(file, length):
            break
    else:
        file = writable(folders) / file_name
        with lock(file.with_name(f"{name}.lock")):
            if not is_whole(file, length):  # nobody made it while this one waited
                decode(files, size, read, file)
                remove_others(file, name)
    # Not shared=True, which wants the right to write. It is the system's one copy of
    # the file all the same, as long as nobody writes to the tensor.
    images = torch.from_file(str(file), False, length, dtype=torch.uint8)
    return images.view(len(files), 3, size, size)


def is_whole(file, length):
    return os.path.isfile(file) and os.path.getsize(file) == length


def writable(folders):
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise UserError(
        f"decoded images can be kept neither in {folders[0]} nor in {folders[-1]}: "
        "make one of them writable"
    )


@contextmanager
def lock(file):
    """Hold a lock that the system takes from a process that is killed.

    Where there can be none (by the file system, or as it is another user's), go on
    without: two that decode at once are slow, not wrong.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            held = stack.enter_context(open(file, "a"))
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def decode(files, size, read, file, threads=None):
    """Write the images that read() finds in these files to one file, in their order.

    threads: by default one for each CPU that this process may use.
    """
    if threads is None:
        linux = hasattr(os, "sched_getaffinity")
        threads = len(os.sched_getaffinity(0)) if linux else os.cpu_count()
    part = file.with_name(f"{file.name}.{os.uname().nodename}-{os.getpid()}.part")
    print(f"Decoding {len(files)} images, once: {file}", flush=True)
    try:
        with open(part, "wb") as out, ThreadPoolExecutor(threads) as pool:
            for i in range(0, len(files), BLOCK):
                images = pool.map(
                    lambda file: read(file, size), files[i : i + BLOCK]
                )
                out.write(torch.stack(list(images)).numpy())
        os.replace(part, file)
    except OSError as error:
        raise UserError(
            f"cannot keep the decoded images in {file.parent} ({error.strerror}): "
            f"they take {len(files) * 3 * size * size / 1e6:.0f} MB"
        ) from None
    finally:
        part.unlink(missing_ok=True)


def remove_others(file, name):
    """Remove what older states of the split have left, and what killed ones did."""
    for other in file.parent.glob(f"{name}-*"):
        with suppress(OSError):  # gone already, or another user's
            age = time.time() - other.stat().st_mtime
            if other != file and (other.suffix != ".part" or age > 3600):
                other.unlink()
