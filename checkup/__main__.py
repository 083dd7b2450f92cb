"""Starts ddp-checkup where it is not installed: `python PATH/checkup ...`."""

from ddp_checkup.cli import main

if __name__ == "__main__":
    main()
