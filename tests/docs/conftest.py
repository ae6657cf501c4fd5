"""These tests write most of the suite's bytes: their files are kept in memory."""

import in_memory

tmp_path_factory = in_memory.tmp_path_factory
