"""`python -m ups` is the `ups` command: for environments whose scripts are not on the path."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory: `h5py.py` next to a data file is not ours to import

from ups.cli.main import main

main()
