"""An opened model under Hugging Face names and row order, with one set of hyper-parameters."""
