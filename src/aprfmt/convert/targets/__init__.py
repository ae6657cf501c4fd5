"""The forms that a model can be written in, a module each."""
