"""One part of each kind, for Universal Physics Stack."""
