"""Logs and metrics of a run."""
