"""Fetches 25,000 photos of dogs and cats, and prepares them for the scripts.

    python download_data.py                 # from Microsoft, 790 MB
    python download_data.py --from FOLDER   # that holds train-2000/, or its splits

Do this once, on a login node: compute nodes mostly have no network. It goes to
DATADIR, or else to data/ in the repository. If it breaks off, type it again.
"""

import io
import re
import zipfile

from common.cli import UserError
from common.download import download_images
from common.prepare import UNREADABLE, progress_bar, read_photo
from dataset import CLASSES, NAME, RAW, SIZE, SPLITS

URL = (
    "https://download.microsoft.com/download/3/E/1/"
    "3E1C3F21-ECDB-4869-8368-6DEBA77B919F/kagglecatsanddogs_5340.zip"
)


def unpack(archive, folder):
    """Unpack PetImages/{Cat,Dog}/N.jpg to folder/SPLIT/{cats,dogs}/.

    In the order of their numbers, without the few that cannot be read, 1,000 of each
    are to train on, 500 to validate on, and the rest to test on. Raises UserError if
    there is no rest.
    """
    with zipfile.ZipFile(archive) as photos:
        for kind in ("Cat", "Dog"):
            found = (
                re.fullmatch(rf"PetImages/{kind}/(\d+)\.jpg", name)
                for name in photos.namelist()
            )
            names = {int(match[1]): match[0] for match in found if match}
            count = 0
            for number in progress_bar(
                sorted(names), f"unpacking {kind}", unit=" photos"
            ):
                photo = photos.read(names[number])
                try:
                    read_photo(io.BytesIO(photo), SIZE)
                except UNREADABLE:
                    continue
                split = SPLITS[(count >= 1000) + (count >= 1500)]
                file = folder / split / f"{kind.lower()}s"
                file.mkdir(parents=True, exist_ok=True)
                (file / f"{kind.lower()}.{number}.jpg").write_bytes(photo)
                count += 1
            print(f"{kind}: {count} of {len(names)} photos can be read")
            if count <= 1500:
                raise UserError(f"{count} photos of a {kind.lower()}")


def main():
    download_images(__doc__, NAME, RAW, URL, unpack, SPLITS, CLASSES, SIZE)


if __name__ == "__main__":
    main()
