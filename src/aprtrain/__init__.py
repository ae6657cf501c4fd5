"""Distillation trainer on top of aprfmt; imports aprfmt, never the other way round."""
