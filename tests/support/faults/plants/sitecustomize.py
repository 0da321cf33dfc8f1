"""Imported by Python at its start where PYTHONPATH names this folder: plants a fault into probes of the doctor."""

import os
import sys

from at_check import VARIABLE, plant_at_check

_words = sys.orig_argv
if "-m" in _words and _words[_words.index("-m") + 1] == "ups.doctor.probes" and os.environ.get(VARIABLE):
    plant_at_check(os.environ[VARIABLE])
