"""Shared material of the suite: real models and tokenizers from package registries, in a cache outside the tree.

`tools/fetch_material.py` fills the cache; what is absent is skipped, except where APR_REQUIRE_MATERIAL=1 (CI).
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import carried_models
import hangs
import hypothesis
import mergekit_peer
import pytest
import skips
from converter_peer import ConverterPeer
from doc_pages import on_two_processors
from llama_peer import LlamaPeer
from processor_times import recorded
from tiny_models import BYTES, build
from tiny_models import CASES as TINY_CASES
from turns import examples, left_out, turn
from warm_workers import WarmWorkers

from aprfmt.errors import set_hint_words
from aprfmt.io import child

ONEDNN_ISAS = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
"""`ATEN_CPU_CAPABILITY` -> the same for oneDNN, which else packs bf16 for the real processor."""
if os.environ.get("ATEN_CPU_CAPABILITY") in ONEDNN_ISAS:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", ONEDNN_ISAS[os.environ["ATEN_CPU_CAPABILITY"]])

# Examples are judged, not the machine's load.
hypothesis.settings.register_profile(
    "here", deadline=None, max_examples=examples(100), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("here")

CACHE = Path(os.environ.get("APR_MATERIAL", Path.home() / ".cache" / "aprfmt" / "material"))
ROOT = Path(__file__).resolve().parent.parent
TOKENIZERS = ("qwen2_5", "qwen3", "llama3", "gemma3", "gpt4o")

LONGEST = (
    *("test_qa", "test_recipe_pages", "test_tokenizer_trip", "test_faults", "test_llama_cpp", "test_distribution"),
    *("test_tokenizer_ranks", "test_vocabulary", "test_conformance", "test_experts", "test_mlx_adapters"),
    *("test_terminal", "test_run", "test_towers", "test_drafts", "test_sharding", "test_any_gguf", "test_adapters"),
    *("test_checkpoint_faults", "test_fuzz", "test_modules", "test_kills", "test_readme", "test_evaluation_llama"),
    "test_interpreted",
)
"""Files of a minute and more on a busy machine."""


def _need(path: Path, what: str) -> Path:
    if not path.exists():
        _fail_or_skip(f"{what} is not in the material cache: run tools/fetch_material.py")
    return path


def _fail_or_skip(message: str) -> None:
    if os.environ.get("APR_REQUIRE_MATERIAL") == "1":
        pytest.fail(message)
    pytest.skip(message)


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts the suite in the background ignores SIGINT for all its children; ours are interrupted."""
    hangs.keep_stderr(config)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not in turn, but where files or tests are named; the others get their order."""
    if not any(Path(word.partition("::")[0]).is_file() for word in config.args):
        out = left_out(items, turn())
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]
    _order(items)


def _order(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker is left alone with one; APR_TEST_ORDER=SEED draws an order instead.

    There the tests of a file run backwards where the seed is odd.
    """
    seed = os.environ.get("APR_TEST_ORDER")
    if seed is None:
        place = {name: at for at, name in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))
        return
    files = sorted({item.path for item in items})
    random.Random(seed).shuffle(files)
    places = {path: at for at, path in enumerate(files)}
    if int(seed) % 2:
        items.reverse()
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Records its processor time where APR_TEST_TIMES asks for it."""
    hangs.watch()
    return (yield from recorded(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Records its processor time where APR_TEST_TIMES asks for it."""
    return (yield from recorded(item, "call"))


def pytest_collection_finish() -> None:
    """The garbage collector need not look at modules and tests again and again: they stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped, why, and what to type to have it."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
        for line in skips.table(report.longrepr[2] for report in skipped):
            terminalreporter.line(line)


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """No test cuts the power, so none waits for the disk; child processes that are started do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_workers() -> Iterator[WarmWorkers]:
    """Processes of llama.cpp start in a tenth of the time; those of tests/llama start as they do for users."""
    with WarmWorkers(child._start) as workers, pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_start", workers.start)
        yield workers


@pytest.fixture(scope="session", autouse=True)
def hints_of_the_command_line() -> Iterator[None]:
    """Hints name options, also those of functions; test_python_words.py tests those for Python callers."""
    before = set_hint_words(None)
    yield
    set_hint_words(before)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the suite exports for llama.cpp does not go to the user's cache, nor its secret to the user's state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("APR_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The repository's fixtures folder."""
    return ROOT / "fixtures"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf: a real llama-architecture model, 272 tensors, 98 MB."""
    return _need(CACHE / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2")


@pytest.fixture(scope="session")
def smollm2_short(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first two layers, with all keys and its tokenizer: a quarter of the bytes. Not to be written to."""
    import aprfmt

    path = tmp_path_factory.mktemp("short") / "SmolLM2-short.gguf"
    aprfmt.prune_model(smollm2_gguf, path, keep_layers=[0, 1])
    return path


@pytest.fixture(scope="session")
def real_tokenizers() -> dict[str, Path]:
    """Folders with real tokenizer.json and tokenizer_config.json, by family."""
    return {name: _need(CACHE / "tokenizers" / name, f"the {name} tokenizer") for name in TOKENIZERS}


@pytest.fixture(scope="session")
def llama_cpp_models() -> Path:
    """llama.cpp's `models` folder with ggml-vocab-*.gguf and their .inp/.out cases."""
    return _need(CACHE / "llama.cpp-models", "llama.cpp's vocabulary files")


@pytest.fixture(scope="session")
def llama_cpp_converter() -> Path:
    """The folder of llama.cpp's own converter: convert_hf_to_gguf.py, conversion/, gguf-py/gguf."""
    return _need(CACHE / "llama.cpp-converter", "llama.cpp's converter")


@pytest.fixture(scope="session")
def llama_cpp_source() -> Path:
    """The sources of libllama."""
    return _need(CACHE / "llama.cpp-source" / "src", "llama.cpp's source")


@pytest.fixture(scope="session")
def mergekit() -> None:
    """mergekit can be run: tests/support/mergekit_peer.py."""
    _need(mergekit_peer.PACKAGES, "mergekit")


@pytest.fixture(scope="session")
def triton() -> Path:
    """The folder with Triton, for a process that interprets kernels."""
    return _need(CACHE / f"triton-{sys.implementation.cache_tag}", "Triton")


@pytest.fixture(scope="session")
def llama_cpp() -> Iterator[LlamaPeer]:
    """llama-cpp-python's llama.cpp, in a process of its own."""
    if find_spec("llama_cpp") is None:
        _fail_or_skip("llama-cpp-python is not installed: run tools/install_llama.sh")
    with LlamaPeer() as peer:
        yield peer


Built = tuple[Path, Any]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Built]:
    """Gives (folder, transformers model) of a case of tiny_models."""
    pytest.importorskip("transformers")
    made: dict[str, Built] = {}

    def get(name: str) -> Built:
        if name not in made:
            case = TINY_CASES[name]
            tokenizers = request.getfixturevalue("real_tokenizers") if case.tokenizer != BYTES else None
            folder = tmp_path_factory.mktemp("models") / name
            made[name] = folder, build(case, folder, tokenizers)
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Built]) -> Path:
    """A small llama-architecture GGUF with a tokenizer, 320 tokens."""
    import aprfmt

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    aprfmt.export_model(tiny_model("mistral")[0], path)
    return path


@pytest.fixture(scope="session")
def carried_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a row of carried_models.FOLDERS: a model that is more than a plain decoder."""
    pytest.importorskip("transformers")
    work = tmp_path_factory.mktemp("carried")

    def get(name: str) -> Path:
        if not (work / name).is_dir():
            carried_models.FOLDERS[name](work / name)
        return work / name

    return get


@pytest.fixture(scope="session")
def carried_gguf(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Gives the file of a row of carried_models.GGUFS, or of CONVERTED, which llama.cpp's converter writes."""
    work = tmp_path_factory.mktemp("carried-gguf")
    peer = ConverterPeer()

    def get(name: str) -> Path:
        path = work / f"{name}.gguf"
        if not path.exists() and name in carried_models.CONVERTED:
            request.getfixturevalue("llama_cpp_converter")
            folder = request.getfixturevalue("carried_folder")(carried_models.CONVERTED[name][0])
            carried_models.convert(folder, name, path, peer)
        elif not path.exists():
            pytest.importorskip("gguf")
            carried_models.GGUFS[name](path)
        return path

    return get


@pytest.fixture(scope="module")
def two_processors() -> Iterator[None]:
    """`on_two_processors` while the tests of a module run."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    on_two_processors()
    yield
    if before is not None:
        os.sched_setaffinity(0, before)
