"""One small module per command; heavy imports inside the command."""
