"""Examines a machine with a recipe, rung by rung; the rungs are processes of their own."""
