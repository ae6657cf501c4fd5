"""`apr hex`: annotates every byte of a model file."""
