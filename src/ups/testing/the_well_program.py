"""Reads a data set with the package `the-well`: a program for an environment of its own, which has no `ups`.

    python the_well_program.py DIRECTORY SPLIT FRAMES

Every line on standard input is an answer on standard output: `dump FILE` writes every window to an .npz file, `time
N N N` reads the windows of these numbers and says how many seconds that took and the largest resident size in MiB.
"""

import resource
import sys
import time
import warnings

import numpy as np


def main() -> None:
    """Opens the data set and answers."""
    from the_well.data import WellDataset  # type: ignore[import-not-found]

    warnings.simplefilter("ignore")
    directory, split, frames = sys.argv[1:]
    data = WellDataset(
        path=directory,
        well_split_name=split,
        use_normalization=False,
        n_steps_input=int(frames) - 1,
        n_steps_output=1,
        normalize_time_grid=False,
    )
    for line in sys.stdin:
        command, *words = line.split()
        if command == "dump":
            found = {f"{i}/{name}": np.asarray(value) for i in range(len(data)) for name, value in data[i].items()}
            np.savez(words[0], count=len(data), **found)
            print(len(data), flush=True)
        else:
            begin = time.perf_counter()
            for number in words:
                data[int(number)]
            seconds = time.perf_counter() - begin
            print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, flush=True)


if __name__ == "__main__":
    main()
