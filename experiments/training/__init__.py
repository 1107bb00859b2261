"""The training loop, its configuration, and everything that makes a run resumable."""
