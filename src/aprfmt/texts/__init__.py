"""Texts to learn from and to measure on: which files hold them, and the documents in them."""
