"""Where metrics go: metrics.jsonl, and from there to other trackers. No torch."""
