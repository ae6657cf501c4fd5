"""Texts to learn from and to measure on: which files hold them, the documents in them, their token ids."""
