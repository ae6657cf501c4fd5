"""Runs models in llama.cpp."""
