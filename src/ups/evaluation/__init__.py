"""Honest scores: metrics, rollouts, baselines beside them, reports."""
