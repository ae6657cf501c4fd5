"""Caps that a crafted file runs into before anything is allocated for it. One test a cap."""

from __future__ import annotations

MAX_NDIM = 8
"""Dimensions of a tensor; the APR writer keeps no more."""

MAX_NAME_BYTES = 65_535
"""Tensor names: the APR index counts them in 16 bits."""

MAX_NAMES_CHARS = 24 << 20
"""Names of all tensors of a model; those of the largest checkpoints have 9 MB."""

MAX_METADATA_BYTES = 64 << 20
"""Metadata section of an APR file; the largest, of a vocabulary of a million tokens, have a third of it."""

MAX_HEADER_BYTES = 64 << 20
"""JSON header of a safetensors file, key-value block of a GGUF; the largest have 25 MB."""

MAX_PARSED_BYTES = 448 << 20
"""What a JSON text, or the header of a GGUF, may take in memory once it is parsed; estimated before it is."""

MAX_STRING_BYTES = 1 << 20
"""A string of a GGUF's keys, but for those that hold a whole file. Licenses are the longest, with 50 KB."""

MAX_ELEMENT_BYTES = 64 << 10
"""A string in an array of a GGUF; the longest tokens and merges have less than 2 KiB."""

MAX_CONFIG_BYTES = 8 << 20
"""A config.json, generation_config.json or preprocessor_config.json; the largest have 200 KB."""

MAX_TEMPLATE_CHARS = 1 << 20
"""A chat template; the longest of real models have 100 KB."""

MAX_TENSORS = 1 << 18
"""Tensors of a file, for each of which about a kilobyte is taken; the largest checkpoints have 140,000."""

MAX_KEYS = 1 << 16
"""Key-value pairs of a GGUF."""

MAX_KEY_BYTES = 65_535
"""A GGUF key."""

MAX_ARRAY_DEPTH = 8
"""Nesting of GGUF arrays."""

MAX_JSON_DEPTH = 127
"""Nesting of JSON metadata, the outermost object counted."""

MAX_LAYERS = 1 << 14
"""Layers of a network, for which lists are made."""

MAX_SPLITS = 65_535
"""Parts of a split GGUF or shards of a safetensors index."""

MAX_UNCOMPRESSED_BYTES = 1 << 30
"""What an APR v1 payload or a compressed legacy image may unpack to."""

MAX_IMAGE_RATIO, MAX_IMAGE_AHEAD = 32, 64 << 20
"""How many times its size it may unpack to, beyond the first 64 MiB; weights come to half their size at most."""

MAX_IMAGE_IN_MEMORY = 64 << 20
"""What of it is kept in memory; more goes to a scratch file."""

MAX_COMPRESSED_BYTES = MAX_UNCOMPRESSED_BYTES + (16 << 20)
"""What such a payload or image takes in the file; what cannot be compressed grows by less than a 64th."""

MAX_LZ4_BYTES = 416 << 20
"""What an LZ4 block and twice its content may take: the library takes one piece, gives one, and copies that."""

MAX_TEXT_FILE_BYTES = 64 << 20
"""A JSON or text file of a Hugging Face folder; the largest tokenizer.json have 35 MB."""

MAX_TOKEN_ID = 1 << 20
"""Ids of a tokenizer; the largest vocabulary in use has 900,000."""

MAX_VOCAB_HOLES = 1 << 16
"""Ids without a token beyond as many as there are tokens."""

MAX_PATH_PARTS, MAX_PATH_CHARS = 64, 1024
"""Folders inside one another, and characters, of the path of a model's file in its folder."""

MAX_RENDERED_LISTS = 64
"""References to the tokenizer's lists in the record of an APR's source files."""

MAX_TEXT_BYTES = 8 << 20
"""A file that an APR keeps as text of the source; larger ones that hold no tokenizer are carried as bytes."""

MAX_CARRIED_FILES = 1 << 14
"""Files of a folder, beside those of the model, that are looked at."""

MAX_LITERAL_BYTES = 40 << 20
"""What an APR keeps of its source files beside tensors and vocabulary; in base64 it fits the metadata."""

MAX_LABELS = 1 << 16
"""Outputs of a classifier without names."""

MAX_PICKLED_BYTES = 64 << 20
"""Longest pickle of a PyTorch file, which holds names and shapes."""

MAX_PICKLE_SECONDS = 10.0
"""Processor time to unpickle one file."""

PICKLE_MEMORY_BYTES = 256 << 20
"""Address space of the process that unpickles; 25 MB of it are Python."""

MAX_TREE_DEPTH = 48
"""Levels of the tree of modules; the rest of a longer name is one part."""

MAX_CHAT_CHARS = 8 << 20
"""Text that a chat template writes."""

MAX_CHAT_SECONDS = 10.0
"""Processor time of a chat template for one conversation."""

CHAT_MEMORY_BYTES = 192 << 20
"""Address space of the process that renders chat templates; 25 MB of it are Python and Jinja."""

MAX_TEMPLATE_CHARS = 1 << 20
"""A chat template."""

MAX_TOKENIZER_SECONDS = 5.0
"""Processor time that the process of a tokenizer may take beyond TOKENIZER_BYTE_SECONDS."""

TOKENIZER_BYTE_SECONDS = 2e-6
"""Processor time for each byte of a request to it (JSON in ASCII); tokenizers in use take a fifth of that."""

TOKENIZER_MEMORY_BYTES = 320 << 20
"""Address space of that process, beside 16 bytes for each of the tokenizer.json."""

MAX_SETTINGS_BYTES = 1 << 20
"""A file of options, or a recipe of a merge."""

MAX_SWITCH_BYTES = 64 << 20
"""The record of an interrupted replacement of files: about 100 bytes for each."""

MAX_SETTINGS_DEPTH = 16
"""Levels of such a file."""

MAX_FILE_NAME_BYTES = 255
"""A file's name in a folder, of which no file system takes more."""

MAX_HUB_ANSWER_BYTES = 16 << 20
"""An answer of the hub's API, such as the list of a repository's files."""

MAX_HUB_NESTED = 1 << 17
"""Objects and lists in such an answer: three for each of MAX_CARRIED_FILES, and the rest of what it says."""

MAX_HUB_REDIRECTS = 10
"""Redirects of a request to the hub."""

MIN_HUB_RATE = 4096
"""Bytes a second below which a download is given up; half a minute is free."""

MIN_HUB_PIECE_BYTES = 64
"""Average bytes of the pieces of an answer; each costs as much time as a thousand bytes of a longer one."""

MAX_RECORD_BYTES = 16 << 20
"""A record of training data: a line of JSON lines, a row of a table. A long book has 5 MB."""

MAX_PARQUET_SECONDS = 10.0
"""Processor time to read a group of a Parquet file's rows, of at most 256."""

PARQUET_MEMORY_BYTES = 640 << 20
"""Address space of the process that reads Parquet; 330 MB of it are Python and pyarrow's libraries."""

MAX_LIST_BYTES = 64 << 20
"""A JSON file that is one list of records; a line of what vLLM computed."""

MAX_WINDOW_BYTES = 128 << 20
"""What a decompressor may look back: zstd --long=27, xz -9 (64 MiB)."""

MAX_UNPACKED_RATIO, MAX_UNPACKED_AHEAD = 200, 32 << 20
"""How many times its size a compressed text may unpack to, beyond the first 32 MiB; logs come to a hundredth."""

MAX_UNPACKED_STREAMS, MIN_UNPACKED_STREAM_BYTES = 1 << 16, 64
"""Streams (gzip members, zstd frames) of a compressed text, beyond one for every 64 bytes of content; each costs as
much time as some hundred bytes of text."""

MAX_DOCUMENT_CHARS = 1 << 20
"""Longest document of training data; a longer text is cut into several."""

MAX_TEXT_GROWTH = 1 << 8
"""How many characters a part of a tokenizer may make of one; charsmaps come to 33, with a replacement to 66."""

MAX_MERGE_WORK = 1 << 27
"""Sum of the squares of the lengths of tokens that are given as bytes: what finding their merges takes. The largest
such vocabularies have 20 million."""

MAX_REPORTED_BYTES = 64 << 20
"""The log of a run that is reported on; 100,000 steps take 40 MB."""

MAX_RUN_FOLDERS = 20_000
"""Folders in which `apr runs` looks for runs."""
