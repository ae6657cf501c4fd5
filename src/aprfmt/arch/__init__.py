"""What models are made of: the architecture table, tensor names, hyper-parameters, reversible row moves."""
