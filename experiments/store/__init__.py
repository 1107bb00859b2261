"""Files under results/: written whole, one owner at a time."""
