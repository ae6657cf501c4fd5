"""From token shards to batches."""
