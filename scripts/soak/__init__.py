"""Runs and scripts that are killed and go on: see `__main__`. Victims and disturbances are tables."""
