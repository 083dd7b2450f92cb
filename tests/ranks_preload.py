"""What the server of ranks.py imports before it forks."""

import cinic  # noqa: F401
import cinic_ddp  # noqa: F401
