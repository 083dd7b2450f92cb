"""Fetches MNIST, on a login node: compute nodes mostly have no network.

    python download_data.py
    python download_data.py --from FOLDER  # which holds MNIST/raw/, or its files

It goes to DATADIR, or else to data/ in the repository.
"""

from common.cli import OptionParser
from common.download import mnist

parser = OptionParser(__doc__)
parser.add_argument(
    "--from", dest="source", metavar="FOLDER", help="copy it from here"
)
mnist(source=parser.parse_args().source)
