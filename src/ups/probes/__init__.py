"""The rungs of `ups doctor`, `python -m ups.probes.NAME WORK_DIR`, a process each; `preflight` alone is imported."""
