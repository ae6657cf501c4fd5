"""The source's own bytes: recorded at import, given back at export."""
