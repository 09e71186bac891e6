"""Recipes: how installed agent programs are started. One module each, with a `RECIPE`; docs/recipes.md says how to add one."""
