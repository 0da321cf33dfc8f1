"""Reference solvers and the sweeps that make the benchmark's data with them."""
