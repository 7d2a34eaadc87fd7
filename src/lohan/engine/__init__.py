"""Runs a Schedule: lanes that move bytes, compute and update at the same time."""
