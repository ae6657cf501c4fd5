"""`apr lint`: what a file could do better."""
