"""Helpers that people and the Makefile run: `python -m scripts.<name> --help`."""
