"""Faults that tests must notice, a row each; `mutate.py` puts them in, one at a time."""

from __future__ import annotations

from mutations_aprfmt import APRFMT
from mutations_aprtrain import APRTRAIN

MUTATIONS = (*APRFMT, *APRTRAIN)
