"""Conversion: any readable model to any writable container, planned first, then streamed."""
