"""Value and gradient of the distillation loss, without materializing a batch of logits."""
