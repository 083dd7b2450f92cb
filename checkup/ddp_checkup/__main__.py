from ddp_checkup.cli import main

main()
