"""For tests of plugins: `ranks` runs a check on real ranks."""
