"""Downloads 25,000 photos of dogs and cats and prepares them for the scripts.

    python download_data.py                 # from Microsoft, 790 MB
    python download_data.py --from FOLDER   # with train-2000/, or its splits

Run it once, on a login node: compute nodes usually have no network. The data goes to
DATADIR or, if that is not set, to data/ in the repository. After an interrupted
download, run the command again.
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

    In numerical order and without the few unreadable photos, the first 1,000 of each
    class go to the training set, the next 500 to the validation set, and the rest to
    the test set. Raises UserError if no photos are left for the test set.
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
            print(f"{kind}: {count} of {len(names)} photos are readable")
            if count <= 1500:
                raise UserError(f"only {count} readable photos of {kind.lower()}s")


def main():
    download_images(__doc__, NAME, RAW, URL, unpack, SPLITS, CLASSES, SIZE)


if __name__ == "__main__":
    main()
