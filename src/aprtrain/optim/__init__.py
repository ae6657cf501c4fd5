"""Update rules over flat buffers, divided among processes."""
