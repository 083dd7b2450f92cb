"""Downloads 25,000 photos of dogs and cats and prepares them for the scripts.

    python download_data.py              # from Microsoft, 790 MB
    python download_data.py --from DIR   # the folder with train/cats/ and so on

Run it once, on a login node: compute nodes usually have no network. The data goes to
DATADIR or, if that is not set, to data/ in the repository.
"""

import io
import re
import zipfile

from PIL import UnidentifiedImageError
from tqdm import tqdm

from common.download import download_images
from common.errors import run
from common.prepare import read_photo
from dataset import NAME, RAW, SIZE, SPLITS

URL = (
    "https://download.microsoft.com/download/3/E/1/"
    "3E1C3F21-ECDB-4869-8368-6DEBA77B919F/kagglecatsanddogs_5340.zip"
)


def unpack(archive, folder):
    """Unpack PetImages/{Cat,Dog}/N.jpg to folder/SPLIT/{cats,dogs}/.

    In numerical order and without the few unreadable photos, the first 1,000 of each
    class go to the training set, the next 500 to the validation set, and the rest to
    the test set. Raises BadZipFile if no photos are left for the test set. Pillow
    may raise DecompressionBombError.
    """
    with zipfile.ZipFile(archive) as photos:
        for animal in ("Cat", "Dog"):
            pattern = re.compile(rf"PetImages/{animal}/(\d+)\.jpg")
            matches = filter(None, map(pattern.fullmatch, photos.namelist()))
            names = {int(match[1]): match[0] for match in matches}
            count = 0
            for number in tqdm(sorted(names), animal, leave=False, disable=None):
                photo = photos.read(names[number])
                try:
                    read_photo(io.BytesIO(photo), SIZE)
                except (UnidentifiedImageError, OSError, SyntaxError):
                    continue
                split = SPLITS[(count >= 1000) + (count >= 1500)]
                target = folder / split / f"{animal.lower()}s"
                target.mkdir(parents=True, exist_ok=True)
                (target / f"{animal.lower()}.{number}.jpg").write_bytes(photo)
                count += 1
            print(f"{animal}: {count} of {len(names)} photos are readable")
            if count <= 1500:
                raise zipfile.BadZipFile(f"only {count} photos of {animal.lower()}s")


def main():
    download_images(__doc__, NAME, RAW, URL, unpack, SPLITS, SIZE)


if __name__ == "__main__":
    run(main)
