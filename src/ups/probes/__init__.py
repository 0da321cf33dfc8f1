"""The rungs of `ups doctor`: `python -m ups.probes.NAME WORK_DIR`, each a process of its own; never imported."""
