"""What the modules agree on: tasks, windows, batches, and the rank that they are for."""
