"""The process outside the ranks that knows the truth. No torch."""
