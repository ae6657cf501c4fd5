"""What a format module knows of an opened model, for tests that look inside."""

from __future__ import annotations

from typing import TypeVar

from aprfmt.formats.apr2 import Apr2Native
from aprfmt.formats.gguf import GgufNative, GgufPart
from aprfmt.formats.hfdir import HfNative
from aprfmt.model import Model

T = TypeVar("T")


def native(model: Model, kind: type[T]) -> T:
    found = model.native_as(kind)
    assert found is not None, f"{model.native!r} is not a {kind.__name__}"
    return found


def apr2_native(model: Model) -> Apr2Native:
    return native(model, Apr2Native)


def gguf_parts(model: Model) -> list[GgufPart]:
    return native(model, GgufNative).parts


def hf_native(model: Model) -> HfNative:
    return native(model, HfNative)
