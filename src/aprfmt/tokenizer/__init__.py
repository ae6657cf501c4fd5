"""Tokenizers: one value, read from and written to Hugging Face files, GGUF keys and APR metadata."""
