"""Another tokenizer for a model, as an edit during a conversion."""

from __future__ import annotations

from contextlib import ExitStack

from aprfmt import formats
from aprfmt.canonical.checks import require_config
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.packed import Decoding
from aprfmt.canonical.read import canonical
from aprfmt.canonical.transplanted_vocabulary import Donor, transplanted_vocabulary
from aprfmt.convert.api import convert
from aprfmt.convert.base_model import with_base_model
from aprfmt.convert.merge_adapters import open_input
from aprfmt.convert.options import TransplantCall, options_of
from aprfmt.convert.report import Report
from aprfmt.convert.source_manifest_writer import restorable
from aprfmt.convert.targets.hf import source_texts
from aprfmt.errors import UsageError
from aprfmt.formats.hf_files import generation_config
from aprfmt.formats.vocabulary import read_vocabulary
from aprfmt.schema import takes

DONOR_TOKENS = 64
"""Shared tokens that express a new one, at most, by default."""


@takes(TransplantCall)
def transplant_model(call: TransplantCall) -> Report:
    """Replaces the tokenizer of the model `src`, and writes `dst` in any output format.

    Rows of the embedding and of the output head of tokens that both tokenizers have are copied: of the same role (EOS,
    BOS, padding, end of a turn), else of the same bytes. A new token's rows are, with a `donor`, the combination of at
    most `k` shared tokens whose embeddings in the donor express the token's there (orthogonal matching pursuit,
    arXiv:2506.06607); else the mean of the rows of the old tokens of its text. All other weights are unchanged.
    Vocabulary size, special ids, chat template and generation settings follow. Train the model afterwards.

    With a donor, its embeddings are held in memory as float32.

    Args:
        src: the model.
        dst: the output file or folder.

    Raises:
        AprError: code "usage" without a tokenizer and a donor; code "refused" for tokenizers whose tokens are not bytes
            of a text (WordPiece, RWKV), a donor with another tokenizer, and towers; and as convert_model.
    """
    if call.tokenizer is None and call.donor is None:
        raise UsageError("no tokenizer given", hint="--tokenizer PATH, or --donor MODEL with the new tokenizer")
    if call.k is not None and call.donor is None:
        raise UsageError("--k requires --donor", hint="add --donor MODEL, or leave out --k")
    path = call.donor if call.tokenizer is None else call.tokenizer
    new = read_vocabulary(formats.path_text(path, "tokenizer"))
    sizes: list[int] = []
    with ExitStack() as stack:

        def edit(c: Canonical) -> tuple[Canonical, list[str]]:
            if c.tokenizer == new:
                return c, ["the model has this tokenizer already: nothing was changed"]
            config = generation_config(source_texts(c, restorable(c, "hf")), str(c.model.path))
            donor = None
            if call.donor is not None:
                model = open_input(stack, call.donor, call.dst, follow_links=call.follow_links)
                require_config(model, False, None)
                donor = Donor(canonical(model, decoding=Decoding(decode=True)), call.k or DONOR_TOKENS, not call.plan)
                sizes.append(model.size_bytes)
            made, remarks = transplanted_vocabulary(c, new, donor, config)
            return with_base_model(made, f"Tokenizer replaced: {remarks[0]}.", "transplanted"), remarks

        report = convert(call.src, call.dst, options_of(call, tokenizer=None), edit, [path] if path is not None else [])
    report.input_bytes += sum(sizes)
    return report
