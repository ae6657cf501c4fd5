"""MTP layers: count, drop or extract those of a canonical model."""

from __future__ import annotations

from dataclasses import replace

from aprfmt.arch import names, scopes
from aprfmt.arch.extra_tensors import ExtraTensors, is_draft, names_drafts
from aprfmt.canonical.model import Canonical
from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.errors import RefusedError


def named_drafts(c: Canonical) -> dict[str, CanonicalTensor]:
    """The tensors of MTP layers whose names the row has in both naming schemes."""
    if c.arch is None or not names_drafts(c.arch):
        return {}
    return {n: t for n, t in c.extras.items() if t.link is not None or names.matches(c.arch, n)}


def with_mtp_layers_counted(c: Canonical) -> Canonical:
    """`c` for a new container, with the number of MTP layers that have names there."""
    if c.arch is None:
        return c
    found = (names.matches(c.arch, n, side) for n in named_drafts(c) for side in ("hf", "gguf"))
    n_drafts = len({match.layer for matches in found for match in matches})
    known = scopes.drafts_key(c.arch).hf
    extra = {name: value for name, value in c.hparams.extra.items() if name not in known}
    if (n_drafts and known) or (names_drafts(c.arch) and len(extra) < len(c.hparams.extra)):
        extra[known[0]] = n_drafts
    return replace(c, hparams=replace(c.hparams, extra=extra))


def without_mtp_layers(c: Canonical) -> tuple[Canonical, list[ExtraTensors]]:
    """`c` without its MTP layers, and a description of what was dropped."""
    drafts = {name: t for name, t in c.extras.items() if is_draft(c.arch, name)}
    others = {name: t for name, t in c.extras.items() if name not in drafts}
    known = scopes.drafts_key(c.arch).hf
    extra = {name: 0 if name in known else value for name, value in c.hparams.extra.items()}
    left = replace(c, extras=others, hparams=replace(c.hparams, extra=extra), is_whole=not drafts)
    return left, replace(c, extras=drafts).extra_parts()


_SHARED = ("token_embd.weight", "output_norm.weight", "output.weight")
"""GGUF names of the tensors that MTP layers share with the network."""


def only_mtp_layers(c: Canonical) -> tuple[Canonical, int]:
    """`c` reduced to its MTP layers and what they share with the network, and the number of tensors left out.

    Raises RefusedError if the row names no MTP layers.
    """
    drafts = named_drafts(c)
    if c.arch is None or not drafts:
        raise RefusedError(
            "the model has no MTP layers that a GGUF can hold",
            path=c.model.path,
            hint="leave out --mtp-only to write the model itself",
        )
    shared = {names.special(c.arch, name) for name in _SHARED}
    kept = {name: t for name, t in c.tensors.items() if name in shared}
    n_left = len(c.tensors) - len(kept)
    for beginning, instead in c.arch.drafts_apart:
        own = (t for name, t in c.extras.items() if name.startswith(beginning))
        kept |= {name: replace(t, name=name) for t in own for name in (instead + t.name.removeprefix(beginning),)}
    return replace(c, tensors=kept, extras=drafts, is_whole=False), n_left
