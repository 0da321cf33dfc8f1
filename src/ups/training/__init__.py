"""One engine, many stages."""
