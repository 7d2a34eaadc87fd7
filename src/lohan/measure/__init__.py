"""Machine and model, measured: what comes out is plain numbers (profiles.py)."""
