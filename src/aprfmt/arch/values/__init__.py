"""Converters of hyper-parameters that config.json and GGUF tell in different ways, a file a kind of network."""
