"""The only layer that touches files: bounds-checked reading, atomic writing, the byte pipeline."""
