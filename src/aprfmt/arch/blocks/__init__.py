"""Building blocks of architectures: tensors and keys that several families share. Data only."""
