"""Every class of transformers with a head of another task, on a network that has a row."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from arch_models import ArchCase, all_cases, quiet_transformers
from registry_sources import HEADLESS, installed, is_known

from aprfmt.arch.heads import head_of


@cache
def _bases() -> dict[str, ArchCase]:
    """Config class -> the first case that has it, one of the network itself before one of a wrapper."""
    found: dict[str, ArchCase] = {}
    for case in sorted(all_cases(), key=lambda case: case.wrapped):
        if case.computable and not case.target:
            found.setdefault(case.config_class, case)
    return found


def head_classes() -> tuple[str, ...]:
    """The classes that are known, each once, sorted."""
    registries = [installed(f"transformers {title}") for title in HEADLESS]
    known = {found.name for registry in registries for found in registry.classes if is_known(registry, found)}
    return tuple(sorted(name for name in known if head_of(name) is not None))


def case_of(name: str) -> ArchCase:
    """The case of the network of a class, with its head. Raises KeyError if no case has the class's config."""
    base = _bases()[getattr(quiet_transformers(), name).config_class.__name__]
    return replace(base, model_class=name, kind="draft", model_options={}, own_head=False)
