"""What ranks.py runs: one case a module."""
