"""Faults planted into real runs from outside, and rank programs to plant them in."""
