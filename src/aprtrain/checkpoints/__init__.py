"""Checkpoints that are models, written beside the training."""
