"""Publishes a model's files and its card on the hub."""
