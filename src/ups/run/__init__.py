"""One run assembled: run directory, rank entry, stages, validation, scoring, bundling, benchmark."""
