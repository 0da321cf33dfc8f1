"""Reads a data set with the package `the-well`: a program for an environment of its own, which has no `ups`.

    python the_well_program.py

Every line on standard input has an answer on standard output: `open DIRECTORY SPLIT FRAMES` says how many windows there
are, `dump FILE` writes them all to an .npz file, `time N N N` reads the windows of these numbers and says how many
seconds that took.
"""

import os
import sys
import time
import warnings
from typing import Any

import numpy as np


def main() -> None:
    """Opens the data set and answers."""
    from the_well.data import WellDataset  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    data: Any = None
    for line in sys.stdin:
        command, *words = line.split()
        if command == "open":
            directory, split, frames = words
            data = WellDataset(
                path=directory,
                well_split_name=split,
                use_normalization=False,
                n_steps_input=int(frames) - 1,
                n_steps_output=1,
                normalize_time_grid=False,
            )
            print(len(data), flush=True)
        elif command == "dump":
            arrays = {f"{i}/{name}": np.asarray(value) for i in range(len(data)) for name, value in data[i].items()}
            np.savez(words[0], **arrays)  # type: ignore[arg-type]
            print(len(arrays), flush=True)
        else:
            begin = time.perf_counter()
            for number in words:
                data[int(number)]
            print(time.perf_counter() - begin, flush=True)
    os._exit(
        0
    )  # the package leaves files open through Python objects, and the interpreter may wait for them in the end


if __name__ == "__main__":
    main()
