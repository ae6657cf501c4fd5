"""Which addresses are servers of a model."""

from __future__ import annotations

import os
from urllib.parse import urlsplit


def is_server(teacher: object) -> bool:
    """Whether a teacher is the URL of a server; pages of the hub are models."""
    if not isinstance(teacher, str) or not teacher.startswith(("http://", "https://")):
        return False
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc
    return urlsplit(teacher).netloc not in (hub, "huggingface.co", "hf.co")
