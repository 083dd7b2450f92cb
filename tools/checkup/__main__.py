"""`torchrun --nproc-per-node 2 PATH/checkup SCRIPT.py` starts this, uninstalled."""

from ddp_checkup.cli import main

if __name__ == "__main__":
    main()
