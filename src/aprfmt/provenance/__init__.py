"""Where a model comes from: license, data, base model, tags, in every container."""
