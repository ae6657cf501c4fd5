"""Looking at models: description, per-tensor figures, rules, comparison. Returns values; never prints."""
