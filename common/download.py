"""Functions that the download_data.py of several lessons share."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.hub import download_url_to_file
from torchvision.datasets.utils import check_md5

from common.data import data_dir
from common.errors import UserError, explain
from common.prepare import prepare


def download_options(doc):
    """Return a parser with the option --from DIR."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=layout)
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="data folder"
    )
    return parser


def download_images(doc, name, raw, url, unpack, splits, size, md5=None):
    """Run the command download_data.py: get image files, and prepare() them.

    They are in SPLIT/CLASS/ of the folder --from DIR or, without that option, of
    DATADIR/name/raw. If raw is missing, unpack(archive, folder) fills it from the
    archive at url. If the download fails or its checksum is wrong, this deletes what
    has arrived and raises UserError.
    """
    parser = download_options(doc)
    parser.add_argument("--url", default=url, help="address of the archive")
    args = parser.parse_args()
    folder = data_dir(name)
    source = args.source or folder / raw
    if not source.exists() and not args.source:
        folder.mkdir(parents=True, exist_ok=True)
        problem, fix = f"cannot download {args.url}", "try again, on a login node"
        # A temporary folder, as somebody else may download the same data now.
        with TemporaryDirectory(dir=folder) as own, explain(problem, fix):
            archive, photos = Path(own, "archive"), Path(own, "photos")
            photos.mkdir()
            download_url_to_file(args.url, str(archive))
            if md5 and not check_md5(archive, md5):
                raise UserError(f"{args.url}: its checksum is wrong; try again")
            unpack(archive, photos)
            if not source.exists():
                photos.rename(source)
    missing = [split for split in splits if not (source / split).is_dir()]
    if missing:
        raise UserError(f"no folder {source / missing[0]}: see --help")
    prepare(source, folder, splits, size)
