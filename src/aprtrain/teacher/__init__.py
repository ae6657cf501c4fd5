"""The frozen side of a distillation."""
