"""Honest scores: metrics, rollouts, references, reports."""
