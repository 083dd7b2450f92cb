"""What the server of ranks.py imports before it forks."""

import cinic_ddp  # noqa: F401
import cinic_tensorboard  # noqa: F401
