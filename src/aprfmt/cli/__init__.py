"""The `apr` command: the only layer that prints. One module a command, imported when it runs."""
