"""What the modules agree on: tasks, windows, batches, and the place of a rank."""
