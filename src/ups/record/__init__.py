"""What is written down and must be true: manifests, black boxes, failure records. Standard library only."""
