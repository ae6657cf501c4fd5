"""Value and gradient of the distillation loss, without a batch of logits in memory."""

IGNORED = -100
"""The label of a position that does not count."""
