"""Fetches CINIC-10, on a login node: compute nodes mostly have no network.

    python download.py cinic

It goes to DATADIR, or else to data/ in the repository.
"""

from common.cli import OptionParser
from common.download import CINIC_URL, cinic

parser = OptionParser(__doc__)
parser.add_argument("name", choices=["cinic"])
parser.add_argument("--url", default=CINIC_URL, help="fetch it from another address")
cinic(parser.parse_args().url)
