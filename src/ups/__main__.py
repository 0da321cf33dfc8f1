"""`python -m ups` is the `ups` command: for environments whose scripts are not on the path."""

from ups.cli.main import main

main()
