"""llama.cpp's mixes: which type each tensor gets."""
