"""The tokenizer of a model, which encodes, decodes and renders its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aprfmt.errors import RefusedError, UsageError
from aprfmt.tokenizer.data import TokenizerData, TokenType


class Tokenizer(TokenizerData):
    """A tokenizer that can be run; the attributes are those of `TokenizerData`."""

    __slots__ = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; special tokens that are spelled out in it are parsed.

        `add_special_tokens` adds what the model expects around a text (such as BOS). Raises UnsupportedError if the
        tokenizer cannot be run, MissingDependencyError without the package tokenizers.
        """
        from aprfmt.tokenizer.encoding import loaded

        return loaded(self).encode([text], special=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids. Raises as `encode`, and UsageError for an id that is not in the vocabulary."""
        from aprfmt.tokenizer.encoding import loaded

        for i in ids:
            if type(i) is not int or not 0 <= i < len(self.tokens):
                raise UsageError(f"token id {i!r:.40} is not in the vocabulary of {len(self.tokens):,}")
        if skip_special_tokens:
            control = {i for i, kind in enumerate(self.types) if kind == TokenType.CONTROL} | {*self.special.values()}
            ids = [i for i in ids if i not in control]
        return loaded(self).decode(ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: object,
    ) -> str | list[int]:
        """A conversation in the model's format: ids, or without `tokenize` the text.

        Args:
            messages: {"role": ..., "content": ...} each, the oldest first.
            add_generation_prompt: end with the beginning of an answer.
            tokenize: give ids instead of the text.
            variables: further variables of the template, such as tools or enable_thinking.

        Raises:
            RefusedError: the tokenizer has no template, or the template rejects the conversation.
            UnsupportedError: the template cannot be rendered.
        """
        from aprfmt.tokenizer.chat_format import template_of

        template = template_of(self)
        if template is None:
            raise RefusedError("the tokenizer has no chat template")
        text = template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text
