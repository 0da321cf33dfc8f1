"""Recipes: the schema, and how a file becomes a validated run description. No torch, no numpy."""
