"""Examines a machine with a recipe, check by check; the checks are processes of their own."""
