"""Writes an Ollama Modelfile for a GGUF: path, chat template in Go syntax, stop tokens, context, license."""

from __future__ import annotations

import re

from aprfmt.canonical.model import Canonical
from aprfmt.text import CONTROLS
from aprfmt.tokenizer.chat_format import ChatFormat, find_format
from aprfmt.tokenizer.data import TokenType
from aprfmt.tokenizer.model import Tokenizer

NAME = "Modelfile"

_BRACES = re.compile(r"\{\{+|\{\Z")
_CONTROL = re.compile(f"(?![\t\n])[{CONTROLS}]")

MOST_CONTEXT = 8192
"""Maximum context in a Modelfile: Ollama allocates memory for all of it."""


def modelfile(c: Canonical, gguf_name: str) -> tuple[bytes, list[str]]:
    """The Modelfile for the GGUF `gguf_name` of `c`, and a sentence for each thing it cannot express.

    Raises MissingDependencyError without jinja2.
    """
    notes: list[str] = []
    lines = [f"FROM ./{gguf_name}", ""]
    tokenizer = c.tokenizer
    found, reason = find_format(tokenizer) if tokenizer is not None else (None, "the model has no tokenizer")
    template = go_template(found) if found is not None else None
    if template is not None and '"""' in template:
        found, template, reason = None, None, "the template contains three quotes in a row"
    if found is not None and template is not None:
        lines += [f'TEMPLATE """{template}"""', ""]
        if found.default:
            lines += [f"SYSTEM {_quoted(found.default)}", ""]
    else:
        lines += [
            f"# No TEMPLATE: {_one_line(reason or '')}. Ollama matches the GGUF's template with those it knows.",
            "",
        ]
        notes.append(f"the Modelfile has no TEMPLATE: {reason}; Ollama must recognize the GGUF's template")
    if tokenizer is not None:
        lines += [f"PARAMETER stop {_quoted(text)}" for text in stops(tokenizer, found)]
    if context := c.hparams.max_position_embeddings:
        if context > MOST_CONTEXT:
            lines.append(f"# The model supports up to {context} tokens; a longer context needs more memory.")
        lines.append(f"PARAMETER num_ctx {min(context, MOST_CONTEXT)}")
    if license := c.info.get("license"):
        lines += ["", f"LICENSE {_quoted(license)}"]
    return "\n".join([*lines, ""]).encode("utf-8", "replace"), notes


def go_template(found: ChatFormat) -> str:
    """The format as a Go text/template over Ollama's .Messages and .System.

    Spaces around a message are kept even if the model's own template trims them: Ollama's templates cannot.
    """
    system, user, assistant = found.system, found.user, found.assistant
    parts = [_literal(found.start), "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"]
    folded = ""
    if system is not None and found.folded:
        inner = f"{_literal(system[0])}{{{{ $.System }}}}{_literal(system[1])}"
        folded = f"{{{{ if and $.System (le $i 1) }}}}{inner}{{{{ end }}}}"
    parts.append(f'{{{{ if eq .Role "user" }}}}{_literal(user[0])}{folded}{{{{ .Content }}}}{_literal(user[1])}')
    if system is not None and not found.folded:
        around = f"{_literal(system[0])}{{{{ .Content }}}}{_literal(system[1])}"
        parts.append(f'{{{{ else if eq .Role "system" }}}}{around}')
    end = f"{{{{ if not $last }}}}{_literal(assistant[1])}{{{{ end }}}}" if assistant[1] else ""
    parts.append(f'{{{{ else if eq .Role "assistant" }}}}{_literal(assistant[0])}{{{{ .Content }}}}{end}{{{{ end }}}}')
    if found.reply:
        parts.append(f'{{{{ if and $last (ne .Role "assistant") }}}}{_literal(found.reply)}{{{{ end }}}}')
    return "".join([*parts, "{{ end }}"])


def _literal(text: str) -> str:
    """Literal text of a template. Two braces, or one before an action, would start an action."""
    return _BRACES.sub(lambda found: f'{{{{ "{found[0]}" }}}}', text)


def stops(tokenizer: Tokenizer, found: ChatFormat | None) -> list[str]:
    """The texts of the tokens that end an answer."""
    ends = (tokenizer.special.get(role) for role in ("eos", "eot", "eom"))
    texts = [tokenizer.tokens[i] for i in ends if i is not None and i < len(tokenizer.tokens)]
    if found is not None:
        kinds = (TokenType.CONTROL, TokenType.USER_DEFINED)
        own = (text for text, kind in zip(tokenizer.tokens, tokenizer.types, strict=False) if kind in kinds and text)
        around = found.assistant[1] + found.user[0]
        texts += sorted((text for text in own if text in around), key=around.index)
    return [text for text in dict.fromkeys(texts) if text.strip() and text.isprintable()]


def _one_line(text: str) -> str:
    return " ".join(_CONTROL.sub(" ", text).split())


def _quoted(text: str) -> str:
    """A value of a Modelfile: quoted, or triple-quoted if it contains line breaks or quotes."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n"))
    if "\n" in text or '"' in text:
        return '"""' + text.replace('"""', "'''") + '"""'
    return f'"{text}"'
