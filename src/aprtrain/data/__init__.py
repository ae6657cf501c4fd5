"""From files to batches: documents, tokens, shards, windows."""
