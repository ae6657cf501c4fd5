"""Which addresses are servers of a model."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{2,5})(?:/\S*)?")


def is_server(teacher: object) -> bool:
    """Whether a teacher is the URL of a server; pages of the hub are models."""
    if not isinstance(teacher, str) or not teacher.startswith(("http://", "https://")):
        return False
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").netloc
    return urlsplit(teacher).netloc not in (hub, "huggingface.co", "hf.co")


def server_url_of(text: str) -> str | None:
    """The URL meant by `localhost:8000` or `host:8000/v1`, typed without a scheme; None for other texts."""
    match = _HOST_AND_PORT.fullmatch(text)
    return None if match is None or int(match["port"]) > 65_535 else f"http://{text}"
