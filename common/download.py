"""What the download_data.py of several lessons share."""

import argparse
import shutil
import zipfile
from pathlib import Path

from torch.hub import download_url_to_file
from torchvision.datasets.utils import check_md5

from common.data import data_dir
from common.errors import UserError
from common.prepare import prepare


def download_options(doc):
    """Return a parser with the option --from FOLDER."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=layout)
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="folder of the data"
    )
    return parser


def download_images(doc, name, raw, url, unpack, splits, size, md5=None):
    """Run the command download_data.py: get image files, and prepare() them.

    They come from --from DIR with SPLIT/CLASS/, or from DATADIR/name/raw, where
    unpack(archive, folder) unpacks the archive at url. Raises UserError if it cannot
    be downloaded, or is another one than expected.
    """
    parser = download_options(doc)
    parser.add_argument("--url", default=url, help="address of the archive")
    args = parser.parse_args()
    source = args.source or data_dir(name) / raw
    archive, part = source.with_suffix(".archive"), source.with_suffix(".part")
    if not source.exists() and not args.source:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            download_url_to_file(args.url, str(archive))
            if md5 and not check_md5(archive, md5):
                raise OSError("its checksum is wrong")
            unpack(archive, part)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"{args.url}: {error}; try on a login node") from None
        finally:
            archive.unlink(missing_ok=True)
        part.rename(source)
    prepare(source, data_dir(name), splits, size)
