"""Networks as single-device code; parallelism is applied from outside."""
