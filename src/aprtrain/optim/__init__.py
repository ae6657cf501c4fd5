"""AdamW over flat buffers, divided among processes."""
