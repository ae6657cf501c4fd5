"""llama.cpp's own programs to measure against, built from the source package of llama-cpp-python."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from fetch_material import CACHE, source_package

# A compiler that tunes for this machine uses AMX where the processor reports it, whether or not the kernel grants it.
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_OFF = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER")


_PORTABLE = "-DGGML_NATIVE=OFF"
"""Compiles for AVX2, FMA, F16C and BMI2 instead of the machine at hand, as wheels are."""


def llama_tool(name: str, *, portable: bool = False) -> Path:
    """The program `name`, such as "llama-quantize"; built with cmake into the material cache where it is not there.

    `portable` builds it for AVX2 instead of this machine.
    """
    tool = CACHE / (f"{name}-avx2" if portable else name) / name
    if not tool.is_file():
        print(f"building {name} once, some minutes on two cores", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            with tarfile.open(source_package()) as tar:
                tar.extractall(work / "source", filter="data")
            source = next(work.glob("source/*/vendor/llama.cpp"))
            options = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *(f"-D{option}=OFF" for option in _OFF)]
            if portable:
                options.append(_PORTABLE)
            elif _knows_amx():
                options += [f"-DCMAKE_C_FLAGS={_NO_AMX}", f"-DCMAKE_CXX_FLAGS={_NO_AMX}"]
            subprocess.run(["cmake", "-S", str(source), "-B", str(work / "build"), *options], check=True)
            build = ["cmake", "--build", str(work / "build"), "--target", name, "-j", "2"]
            subprocess.run(build, check=True)
            tool.parent.mkdir(parents=True, exist_ok=True)
            next(work.glob(f"build/bin/{name}")).rename(tool)
    return tool


def _knows_amx() -> bool:
    command = ["cc", *_NO_AMX.split(), "-x", "c", "-c", "/dev/null", "-o", "/dev/null"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
