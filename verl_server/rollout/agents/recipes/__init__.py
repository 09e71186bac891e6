"""Recipes of installed agents: one module each, with a `RECIPE`. docs/recipes.md says how to add one."""
