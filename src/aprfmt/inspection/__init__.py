"""Inspects models: description, per-tensor statistics, rules, comparison. Returns values; never prints."""
