"""The rows of the architecture table, a file a kind of network, and the blocks they are made of. Data only."""
