"""Limits on untrusted input, checked before anything is allocated. One test per limit."""

from __future__ import annotations

MAX_NDIM = 8
"""Dimensions of a tensor; the APR writer stores no more."""

MAX_NAME_BYTES = 65_535
"""Length of a tensor name: the APR index uses 16 bits."""

MAX_NAMES_CHARS = 24 << 20
"""Total length of a model's tensor names; the largest checkpoints have 9 MB."""

MAX_METADATA_BYTES = 64 << 20
"""Metadata section of an APR file; the largest, of a vocabulary of a million tokens, have a third of it."""

MAX_HEADER_BYTES = 64 << 20
"""JSON header of a safetensors file, key-value block of a GGUF; the largest have 25 MB."""

MAX_PARSED_BYTES = 448 << 20
"""Estimated memory of a parsed JSON text or GGUF header."""

MAX_STRING_BYTES = 1 << 20
"""A string value in a GGUF, except keys that hold a whole file. Licenses are the longest, with 50 KB."""

MAX_ELEMENT_BYTES = 64 << 10
"""A string in an array of a GGUF; the longest tokens and merges have less than 2 KiB."""

MAX_CONFIG_BYTES = 8 << 20
"""A config.json, generation_config.json or preprocessor_config.json; the largest have 200 KB."""

MAX_TEMPLATE_CHARS = 1 << 20
"""A chat template; the longest of real models have 100 KB."""

MAX_TENSORS = 1 << 18
"""Tensors of a file, each of which takes about a kilobyte of memory; the largest checkpoints have 140,000."""

MAX_KEYS = 1 << 16
"""Key-value pairs of a GGUF."""

MAX_KEY_BYTES = 65_535
"""A GGUF key."""

MAX_ARRAY_DEPTH = 8
"""Nesting of GGUF arrays."""

MAX_JSON_DEPTH = 127
"""Nesting of JSON metadata, including the outermost object."""

MAX_LAYERS = 1 << 14
"""Layers of a network, for which lists are allocated."""

MAX_SPLITS = 65_535
"""Parts of a split GGUF or shards of a safetensors index."""

MAX_UNCOMPRESSED_BYTES = 1 << 30
"""Decompressed size of an APR v1 payload or a compressed legacy image."""

MAX_IMAGE_RATIO, MAX_IMAGE_AHEAD = 32, 64 << 20
"""Maximum compression ratio of it, beyond the first 64 MiB; weights compress to half their size at best."""

MAX_IMAGE_IN_MEMORY = 64 << 20
"""The part of it kept in memory; the rest goes to a scratch file."""

MAX_COMPRESSED_BYTES = MAX_UNCOMPRESSED_BYTES + (16 << 20)
"""Compressed size of such a payload or image; incompressible data grows by less than a 64th."""

MAX_LZ4_BYTES = 416 << 20
"""An LZ4 block plus twice its content: the library reads one buffer, returns one, and copies it."""

MAX_TEXT_FILE_BYTES = 64 << 20
"""A JSON or text file of a Hugging Face folder; the largest tokenizer.json have 35 MB."""

MAX_TOKEN_ID = 1 << 20
"""Ids of a tokenizer; the largest vocabulary in use has 900,000."""

MAX_VOCAB_HOLES = 1 << 16
"""Ids without a token, in addition to the number of tokens."""

MAX_PATH_PARTS, MAX_PATH_CHARS = 64, 1024
"""Depth, and length in characters, of the path of a model's file in its folder."""

MAX_RENDERED_LISTS = 64
"""References to the tokenizer's lists in an APR's source manifest."""

MAX_TEXT_BYTES = 8 << 20
"""A file that an APR keeps as a text file of the source; larger ones without a tokenizer are carried as bytes."""

MAX_CARRIED_FILES = 1 << 14
"""Files of a folder that are examined besides those of the model."""

MAX_LITERAL_BYTES = 40 << 20
"""Literal bytes in an APR's source manifest; in base64 they fit the metadata."""

MAX_LABELS = 1 << 16
"""Outputs of a classifier without labels."""

MAX_PICKLED_BYTES = 64 << 20
"""The pickle of a PyTorch file, which contains names and shapes."""

MAX_PICKLE_SECONDS = 10.0
"""Processor time to unpickle one file."""

PICKLE_MEMORY_BYTES = 256 << 20
"""Address space of the process that unpickles; 25 MB of it are Python itself."""

MAX_VOCABULARY_MULTIPLE = 1 << 16
"""Multiple to which a vocabulary is padded."""

MAX_TREE_DEPTH = 48
"""Levels of the module tree; the rest of a longer name is one part."""

MAX_CHAT_CHARS = 8 << 20
"""Rendered text of a chat template."""

MAX_CHAT_SECONDS = 10.0
"""Processor time of a chat template for one conversation."""

CHAT_MEMORY_BYTES = 192 << 20
"""Address space of the process that renders chat templates; 25 MB of it are Python and Jinja."""

MAX_TEMPLATE_CHARS = 1 << 20
"""A chat template."""

MAX_TOKENIZER_SECONDS = 5.0
"""Processor time of a tokenizer's process in addition to TOKENIZER_BYTE_SECONDS."""

TOKENIZER_BYTE_SECONDS = 2e-6
"""Processor time per byte of a request to it (ASCII JSON); common tokenizers take a fifth of that."""

TOKENIZER_MEMORY_BYTES = 320 << 20
"""Address space of that process, plus 16 bytes per byte of the tokenizer.json."""

MAX_SETTINGS_BYTES = 1 << 20
"""A settings file, or a merge recipe."""

MAX_SWITCH_BYTES = 64 << 20
"""The record of an interrupted switch: about 100 bytes per file."""

MAX_SETTINGS_DEPTH = 16
"""Nesting of such a file."""

MAX_FILE_NAME_BYTES = 255
"""Length of a file name; no file system allows more."""

MAX_HUB_ANSWER_BYTES = 16 << 20
"""A response of the hub's API, such as the file list of a repository."""

MAX_HUB_NESTED = 1 << 17
"""Objects and lists in such a response: three for each of MAX_CARRIED_FILES, plus the rest."""

MAX_HUB_REDIRECTS = 10
"""Redirects of a request to the hub."""

MIN_HUB_RATE = 4096
"""Bytes per second below which a download is aborted; the first half minute is exempt."""

MAX_REGISTRY_ANSWER_BYTES = 4 << 20
"""A manifest or another response of an OCI registry's API; distribution-spec asks for manifests of this size."""

MIN_HUB_PIECE_BYTES = 64
"""Average size of the chunks of a response; each costs as much time as a thousand bytes of a longer one."""

MAX_RECORD_BYTES = 16 << 20
"""A record of training data: a line of JSON lines, a row of a table. A long book has 5 MB."""

MAX_PARQUET_SECONDS = 10.0
"""Processor time to read a group of a Parquet file's rows, of at most 256."""

PARQUET_MEMORY_BYTES = 640 << 20
"""Address space of the process that reads Parquet; 330 MB of it are Python and pyarrow's libraries."""

MAX_LIST_BYTES = 64 << 20
"""A JSON file that is a single list of records; a line of a vLLM response file."""

MAX_WINDOW_BYTES = 128 << 20
"""Window of a decompressor: zstd --long=27, xz -9 (64 MiB)."""

MAX_UNPACKED_RATIO, MAX_UNPACKED_AHEAD = 200, 32 << 20
"""Maximum compression ratio of a text, beyond the first 32 MiB; logs reach a hundred."""

MAX_UNPACKED_STREAMS, MIN_UNPACKED_STREAM_BYTES = 1 << 16, 64
"""Streams (gzip members, zstd frames) of a compressed text, in addition to one per 64 bytes of content; each costs as
much time as some hundred bytes of text.
"""

MAX_DOCUMENT_CHARS = 1 << 20
"""Longest document of training data; a longer text is split."""

MAX_TEXT_GROWTH = 1 << 8
"""How many characters a part of a tokenizer may make of one; charsmaps reach 33, with a replacement 66."""

MAX_MERGE_WORK = 1 << 27
"""Sum of the squared lengths of byte tokens: the cost of finding their merges. The largest such vocabularies have 20
million.
"""

MAX_REPORTED_BYTES = 64 << 20
"""The log of a run in a report; 100,000 steps take 40 MB."""

MAX_RUN_FOLDERS = 20_000
"""Folders that `apr runs` searches."""

MAX_KEY_FILE_BYTES = 1 << 20
"""A PEM file with a key or certificates; the bundles of operating systems have 250 KB."""

MAX_SIGNATURE_BYTES = 16 << 20
"""A signature bundle; one of 10,000 files has 2 MB."""

MAX_SIGNED_FILES = 1 << 16
"""Files of a folder that a signature covers, and shards of a file."""

MAX_CANARY_BYTES = 64 << 20
"""A canary file; one of 100 layers has 3 MB."""
