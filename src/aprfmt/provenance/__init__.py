"""Where a model comes from: licence, data, base model, tags, in every container."""
