"""Helpers of the lint rules, and the commands that they suggest."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path

from aprfmt.canonical.model import Canonical
from aprfmt.canonical.model_kinds import is_adapter
from aprfmt.codecs.dtypes import DTYPES, n_elements
from aprfmt.formats import apr2
from aprfmt.formats.gguf import GgufNative
from aprfmt.inspection.validate import Check, Subject
from aprfmt.model import Model, Tensor
from aprfmt.provenance import provenance
from aprfmt.tokenizer.model import Tokenizer


def gguf_of(subject: Subject) -> GgufNative | None:
    """The parts of a GGUF; None for another container."""
    return subject.model.native_as(GgufNative)


def quoted(model: Model) -> str:
    """The model's path quoted for a shell."""
    return shlex.quote(str(model.path))


def set_key(model: Model, key: str, value: str, option: str = "") -> str:
    """How to set a fact about the model: GGUF key `key`, or the equivalent option of apr stamp."""
    if model.convention == "gguf":
        return f"apr stamp {quoted(model)} --in-place --set {key}={value}"
    if apr2.native_of(model) is not None:
        return f"apr stamp {quoted(model)} --in-place {option or f'--set {key}={value}'}"
    if model.convention == "hf":
        return f"add `{key.removeprefix('general.')}: {value}` to the front matter of the folder's README.md"
    return (
        f"apr import {quoted(model)} -o NEW.apr, then apr stamp NEW.apr --in-place {option or f'--set {key}={value}'}"
    )


def anew(model: Model, options: str = "") -> str:
    """The command that writes the file anew."""
    source = "ORIGINAL" if BLOCK_TYPES & {t.dtype for t in model.tensors.entries} else quoted(model)
    return f"apr convert {source} -o NEW{Path(model.path).suffix} {options}".rstrip()


BLOCK_TYPES = frozenset(name for name, row in DTYPES.items() if row.kind != "plain")
"""Dtypes whose values share scales."""


def network_of(subject: Subject) -> Canonical | None:
    """The model if it is a network in the table; None for adapters, towers, matrices and unknown ones."""
    found = subject.canonical
    is_one = isinstance(found, Canonical) and found.arch is not None and not found.part
    return found if isinstance(found, Canonical) and is_one and not is_adapter(subject.model) else None


def is_main(subject: Subject) -> bool:
    """Whether it is a complete model, not an adapter, tower or tool's matrices."""
    model = subject.model
    if not model.tensors or is_adapter(model):
        return False
    return model.convention != "gguf" or model.metadata.get("general.type", "model") == "model"


def matrices_of(model: Model) -> list[Tensor]:
    """Its tensors of two dims and more."""
    return [t for t in model.tensors.entries if len(t.shape) >= 2]


def main_dtype(tensors: Sequence[Tensor]) -> str | None:
    """The dtype of most of the parameters."""
    totals = Counter[str]()
    for tensor in tensors:
        totals[tensor.dtype] += n_elements(tensor.shape)
    return max(totals, key=lambda name: totals[name], default=None)


def tokenizer_of(subject: Subject) -> Tokenizer | None:
    """Its tokenizer; None for one without tokens."""
    found = subject.model.tokenizer
    return found if found is not None and found.tokens else None


def name_of(subject: Subject) -> str:
    """The names of the model: in its metadata and its path."""
    info = provenance.read(subject.model).info if subject.model.format != "apr-v1" else {}
    return f"{info.get('name', '')} {subject.model.path.resolve().name}"


def skip(why: str) -> Check:
    """Skips a rule that does not apply to the file."""
    return Check("skip", why)


def fail(message: str, suggestion: str | None = None, tensor: str | None = None) -> Check:
    """A finding, what to do about it, and the tensor concerned."""
    return Check("fail", message, tensor, suggestion=suggestion)


def of_gguf(rule: Callable[[Subject], Iterator[Check]]) -> Callable[[Subject], Iterator[Check]]:
    """Decorates a rule about GGUF files: skips it for other containers."""

    @wraps(rule)
    def check(subject: Subject) -> Iterator[Check]:
        return iter([skip(NO_GGUF)]) if gguf_of(subject) is None else rule(subject)

    return check


NO_GGUF = "not a GGUF file"
NO_NETWORK = "not a language model of a known architecture"
NO_TOKENIZER = "no tokenizer"
