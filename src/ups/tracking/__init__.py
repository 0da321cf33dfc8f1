"""Where metrics go. No torch."""
