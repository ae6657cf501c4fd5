"""`apr hex`: what every byte of a model file means."""
