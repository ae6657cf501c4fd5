"""Training and evaluation data: files, documents, token ids."""
