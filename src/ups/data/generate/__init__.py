"""Reference solvers and sweeps that write the formats the readers read."""
