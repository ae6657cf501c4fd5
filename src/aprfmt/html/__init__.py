"""Pages that stand alone: no network, no libraries."""
