"""From trajectory files to the right window on the right rank."""
