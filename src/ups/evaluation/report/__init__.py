"""One HTML file that opens from disk: scores, curves, fields, films. Needs matplotlib (extra `report`)."""
