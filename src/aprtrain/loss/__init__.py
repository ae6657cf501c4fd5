"""Value and gradient of the distillation loss, without a batch of logits in memory."""
