"""Generates text with llama.cpp: a single prompt, or a conversation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aprfmt import formats
from aprfmt.errors import NotFoundError, RefusedError, UsageError
from aprfmt.formats import hf_files
from aprfmt.io.source import is_file
from aprfmt.llama.client import MOST_CONTEXT, Generated, Llama, pooling_of
from aprfmt.llama.engine import MEDIA_MARKER, Sampling
from aprfmt.running.prepared import Prepared, prepare, prepare_adapter, prepare_tower
from aprfmt.schema import flag_of
from aprfmt.tokenizer import chat
from aprfmt.tokenizer.chat import ChatTemplate
from aprfmt.tokenizer.data import is_unicode
from aprfmt.types import PathLike

DEFAULT_CONTEXT = 4096
"""Default context length, if the model was trained with at least as much."""

RAW_TOKENS = 256
"""Default maximum number of tokens of a raw continuation."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of `run`.

    Attributes:
        model: the file, as given.
        engine: the package that provides llama.cpp.
        text: the generated text, without the stop string.
        tokens: ids of the generated tokens, including an end token.
        ended: why generation ended: "end" (end token), "stop" (stop string), "length", "context" (full) or "interrupt".
        prompt: the text that the model received.
        prompt_tokens: number of tokens of the prompt.
        load_seconds, prompt_seconds, seconds: time to load the model, to process the prompt, and to generate.
        exported: the cached GGUF exported for this run; None if none was needed.
    """

    model: str
    engine: str
    text: str
    tokens: list[int]
    ended: str
    prompt: str
    prompt_tokens: int
    load_seconds: float
    prompt_seconds: float
    seconds: float
    exported: str | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Generation speed, None if the answer was too short to measure."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 and self.seconds > 0 else None

    def to_json(self) -> dict[str, object]:
        """The object of `apr run --json`."""
        body = asdict(self)
        timings: dict[str, object] = {name: body.pop(name) for name in _TIMES}
        return body | {"timings": timings | {"tokens_per_second": self.tokens_per_second}}


_TIMES = ("load_seconds", "prompt_seconds", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a model is loaded.

    Attributes:
        ctx: context length in tokens; 0: the training context; None: the same, at most DEFAULT_CONTEXT.
        threads: llama.cpp threads; 0: half of the CPUs.
        gpu_layers: layers to offload to a GPU, if llama.cpp supports it.
        lora: adapters to apply, each with its scale.
        mmproj: GGUF of the towers (vision, audio), or a model that has them.
        media: whether prompts contain images or audio.
        template: file of a chat template, or the name of one of the model's or llama.cpp's; None: the model's default.
        dtype: dtype of an export, as for convert_model.
        raw: skip chat rendering, so that its process need not start.
    """

    ctx: int | None = None
    threads: int = 0
    gpu_layers: int = 0
    lora: Sequence[tuple[PathLike, float]] = ()
    mmproj: PathLike | None = None
    media: bool = False
    template: str | None = None
    dtype: str = "keep"
    raw: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for an invalid scale."""
        for path, scale in self.lora:
            if not -_MOST_SCALE <= scale <= _MOST_SCALE:
                raise UsageError(f"the scale of an adapter must be a number, not {scale!r:.40}: {os.fspath(path)}")


_MOST_SCALE = 1e30
"""Largest accepted float32 scale, with headroom for products."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        text: the user's message, or a text to continue.
        system: system message.
        raw: whether to continue the text; None: if the model has no chat template.
        media: image and audio files.
    """

    text: str
    system: str | None = None
    raw: bool | None = None
    media: Sequence[PathLike] = ()

    def check(self) -> None:
        """Raises UsageError, and NotFoundError for a missing file."""
        if self.raw and self.system is not None:
            raise UsageError("a system message needs a chat template, which --raw disables")
        with_markers(self.text, len(self.media))
        for text in (self.text, self.system):
            require_unicode(text or "")
        for path in self.media:
            if not is_file(path):
                raise NotFoundError("no such file", path=path)


def sampling_of(**values: float) -> Sampling:
    """Sampling parameters from these values. Raises UsageError for values out of range, or without effect."""
    for name, (least, most, kind) in _RANGES.items():
        value = values[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole or (kind is float and isinstance(value, float))) or not least <= value <= most:
            raise UsageError(f"{flag_of(name)} must be {_KINDS[kind]} from {least:g} to {most:g}, not {value!r:.40}")
    usual = Sampling()
    if not values["temperature"]:
        # A seed too is harmless: `temperature=0, seed=1` is how many ask for the same text each time.
        settings = [name for name in values if name not in ("temperature", "seed")]
        named = [name for name in settings if values[name] != getattr(usual, name)]
        if named:
            raise UsageError(
                f"{flag_of(named[0])} has no effect at temperature 0: decoding is greedy", hint="add --temperature 0.8"
            )
    return Sampling(**values)  # type: ignore[arg-type]  # checked above


_RANGES: dict[str, tuple[float, float, type]] = {
    "temperature": (0, 100, float),
    "top_k": (0, 2**31 - 1, int),
    "top_p": (0, 1, float),
    "min_p": (0, 1, float),
    "seed": (0, 2**32 - 1, int),
}
_KINDS = {int: "an integer", float: "a number"}


class Runner:
    """A model that is ready to generate. Use in `with`.

    Args:
        file: the model, in any format.
        loading: how to load it.
        say: called with a line before something is exported.

    Attributes:
        path: the model, as given.
        llama: the model in llama.cpp.
        template: its chat template; the name of one of llama.cpp's; None for a model without one.

    Raises:
        RefusedError: the file is not a text generation model, or an adapter is for another model.
        RunError: llama.cpp refuses the file.
    """

    def __init__(self, file: PathLike, loading: Loading, say: Callable[[str], None] = lambda line: None) -> None:
        self.path = formats.path_text(file, "file")
        self._prepared = prepare(file, dtype=loading.dtype, say=say)
        self._metadata = metadata = metadata_of(self._prepared.path)
        check_reads_text(metadata, self.path)
        if any(key.startswith("diffusion.") for key in metadata):
            raise RefusedError(
                "the model is a diffusion language model and does not generate token by token",
                path=self.path,
                hint=f"run it with llama.cpp: llama-diffusion-cli -m {self._prepared.path}",
            )
        if pooling_of(metadata)[1]:
            raise RefusedError(
                "the model is an encoder: it computes embeddings, it does not generate text",
                path=self.path,
                hint=f'apr run {self.path} --embed "some text"',
            )
        adapters = [(prepare_adapter(path, file, self._prepared, say=say), scale) for path, scale in loading.lora]
        tower: Prepared | None = None
        if loading.media or loading.mmproj is not None:
            tower = prepare_tower(loading.mmproj if loading.mmproj is not None else file, say=say)
        if not loading.raw and (loading.template is not None or "{" in str(metadata.get(_TEMPLATE))):
            chat.start()  # it is ready when llama.cpp has loaded the model
        self.llama = Llama(
            self._prepared.path, n_ctx=context_of(metadata, loading.ctx), name=self.path,
            n_bytes=self._prepared.n_bytes, adapters=adapters, n_threads=loading.threads, gpu_layers=loading.gpu_layers,
            tower=tower.path if tower is not None else None,
        )  # fmt: skip
        try:
            self.template = self._template(loading.template)
        except BaseException:
            self.llama.close()
            raise

    def _template(self, wanted: str | None) -> ChatTemplate | str | None:
        metadata, path = self._metadata, self.path
        source, name = metadata.get(_TEMPLATE), "the chat template"
        if wanted is not None:
            if (own := metadata.get(f"{_TEMPLATE}.{wanted}")) is not None:
                source, name = own, f"the chat template {wanted!r}"
            elif is_file(wanted):
                return self._rendering(_template_file(wanted), "the chat template", wanted)
            elif os.sep in wanted or wanted.endswith(".jinja"):
                raise NotFoundError("unknown chat template", path=wanted)
            else:
                return wanted
        if not isinstance(source, str) or not source.strip():
            return None
        if "{" not in source:
            return source  # the name of one of llama.cpp's
        return self._rendering(source, name, path)

    def _rendering(self, source: str, name: str, path: str) -> ChatTemplate:
        metadata = self._metadata
        roles = {"bos": self.llama.facts.bos, "eos": self.llama.facts.eos}
        for role, key in _ROLES.items():
            value = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(value, int) and 0 <= value < self.llama.n_vocab:
                roles[role] = value
        special = {
            role: self.llama.detokenize([token], special=True) if token >= 0 else "" for role, token in roles.items()
        }
        return ChatTemplate(source, special, name, path)

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Renders a conversation with the template, including the generation prompt. Raises AprError."""
        if self.template is None:
            raise UsageError(
                f"the model has no chat template: {self.path}",
                hint="use --raw to continue a text, or set one with --template",
            )
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        if isinstance(self.template, str):
            return self.llama.chat(self.template, plain)
        return self.template.render(plain)

    def ids(self, text: str, *, raw: bool = False) -> list[int]:
        """The tokens of a prompt: BOS is added to a raw text; a rendered chat already has it, or lacks it."""
        if raw:
            return self.llama.tokenize(text)
        ids = self.llama.tokenize(text, add_special=False)
        facts = self.llama.facts
        return ids if not facts.adds_bos or ids[:1] == [facts.bos] else [facts.bos, *ids]

    def ask(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> RunResult:
        """Answers one prompt; the options are those of `answer`. Raises AprError."""
        raw = prompt.raw if prompt.raw is not None else self.template is None
        text = with_markers(prompt.text, len(prompt.media))
        if raw and prompt.system is not None:
            self.chat_text([])  # reports the missing template
        if not raw:
            system = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
            text = self.chat_text([*system, {"role": "user", "content": text}])
        return self.answer(
            text, raw=raw, max_tokens=max_tokens, sampling=sampling, stop=stop, media=prompt.media, on_text=on_text
        )

    def answer(
        self,
        text: str,
        *,
        raw: bool = False,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        media: Sequence[PathLike] = (),
        reuse: bool = False,
        on_text: Callable[[str], None] | None = None,
    ) -> RunResult:
        """Continues the text of a prompt. Raises RunError.

        Args:
            text: the prompt; engine.MEDIA_MARKER marks the position of each file of `media`.
            raw: whether it is a text to continue instead of a chat.
            max_tokens: maximum number of tokens; None: until the model ends or the context is full, RAW_TOKENS for a
                raw text.
            sampling: sampling parameters; None: greedy.
            stop: stop strings.
            media: image and audio files.
            reuse: keep the common prefix that the context already has.
            on_text: called with each part of the answer as it is generated.
        """
        facts = self.llama.facts
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise UsageError(f"--max-tokens must be 1 or more, not {max_tokens!r:.40}")
        if max_tokens is None:
            max_tokens = RAW_TOKENS if raw else facts.n_ctx
        prompt: str | list[int] = self.ids(text, raw=raw)
        if media:
            bos = self.llama.detokenize([facts.bos], special=True) if facts.adds_bos and facts.bos >= 0 else ""
            prompt = text if text.startswith(bos) else bos + text
        made: Generated = self.llama.generate(
            prompt, max_tokens, sampling=sampling, stop=stop, media=media, reuse=reuse, on_text=on_text
        )
        return RunResult(
            model=self.path, engine=self.llama.engine, text=made.text, tokens=made.ids, ended=made.ended, prompt=text,
            prompt_tokens=made.prompt_tokens, load_seconds=self.llama.facts.load_seconds,
            prompt_seconds=made.prompt_seconds, seconds=made.seconds,
            exported=self._prepared.path if self._prepared.report is not None else None,
        )  # fmt: skip

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.llama.close()


_TEMPLATE = "tokenizer.chat_template"
_ROLES = {"unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls", "mask": "mask"}
"""Role of a special token -> its part of the GGUF key; "seperator" is the key's spelling."""


def _template_file(path: str) -> str:
    """Reads a Jinja template. Raises UsageError for another kind of file."""
    try:
        text = hf_files.read_text_file(Path(path)).decode()
    except UnicodeDecodeError:
        raise UsageError("the chat template is not UTF-8 text", path=path) from None
    if not text.strip():
        raise UsageError("the chat template is empty", path=path)
    return text


def metadata_of(gguf: str) -> Mapping[str, object]:
    """The keys of a GGUF."""
    with formats.open(gguf) as model:
        return dict(model.metadata)


def check_reads_text(metadata: Mapping[str, object], path: str) -> None:
    """Raises RefusedError for a GGUF without a model that reads text."""
    kind = metadata.get("general.type")
    if kind == "adapter":
        raise RefusedError("this is an adapter", path=path, hint=f"apr run BASE --lora {path}")
    if kind == "imatrix":
        raise RefusedError(
            "this is an importance matrix", path=path, hint=f"apr quantize MODEL TYPE -o OUT --imatrix {path}"
        )
    if kind == "mmproj" or metadata.get("general.architecture") == "clip":
        raise RefusedError(
            "this is a tower without its language model", path=path, hint=f"apr run TEXT.gguf --mmproj {path}"
        )


def context_of(metadata: Mapping[str, object], wanted: int | None, usual: int = DEFAULT_CONTEXT) -> int:
    """Context length: the requested one, else `usual`, or the training context if smaller. Raises UsageError."""
    if wanted is not None:
        if type(wanted) is not int or not 0 <= wanted <= MOST_CONTEXT:
            raise UsageError(f"--ctx must be an integer from 0 to {MOST_CONTEXT}, not {wanted!r:.40}")
        return wanted
    trained = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return min(trained, usual) if isinstance(trained, int) and trained > 0 else usual


def require_unicode(text: str) -> None:
    """Raises UsageError for text that Unicode cannot encode, such as undecodable bytes."""
    if not is_unicode(text):
        raise UsageError("the text is not valid Unicode", hint="pass it in UTF-8")


def with_markers(text: str, n: int) -> str:
    """A message with `n` files: they come first, unless it has markers. Raises UsageError."""
    found = text.count(MEDIA_MARKER)
    if n and found not in (0, n):
        raise UsageError(
            f"the prompt has the file marker {MEDIA_MARKER} {found} times, but {n} files are given",
            hint="without the marker, files come first",
        )
    return text if found or not n else MEDIA_MARKER * n + "\n" + text
