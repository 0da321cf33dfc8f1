"""Files of data: the contract of a reader, and one module or more for each format."""
