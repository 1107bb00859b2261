"""What coordinated ordering costs, measured against what it competes with: `python -m scripts.bench --help`."""
