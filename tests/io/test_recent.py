"""The cache of recent values."""

from __future__ import annotations

from collections.abc import Callable

from aprfmt.io.recent import RecentValues


def test_the_least_recently_used_value_is_dropped() -> None:
    computed: list[str] = []

    def value(name: str) -> Callable[[], str | None]:
        return lambda: computed.append(name)  # None is a value too

    cache: RecentValues[str, str | None] = RecentValues(2)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert cache.get(name, value(name)) is None
    assert computed == ["a", "b", "c", "b"]
