#!/usr/bin/env bash
# Installs llama-cpp-python into the environment of the given python, which has aprfmt. It is built from source, some
# minutes on two cores, so the wheel is kept in a cache outside the tree and reused: $APR_WHEELS, else
# ~/.cache/aprfmt/wheels. What does not run a quantized model is not left installed. With --wheel it is only built, which
# needs no aprfmt.
#
# The build leaves out llama.cpp's `common`, which no library here links, and compiles what builds graphs with -O1: that
# is half of the time, and no kernel is in it (ggml keeps -O3).
set -euo pipefail
python=${1:-python3}
version=0.3.36

# A compiler that tunes for this machine uses AMX where the processor reports it, whether or not the kernel grants it;
# the first matrix product then dies. The name of the folder keeps wheels built otherwise apart.
flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
kind=no-amx
if ! echo | ${CC:-cc} $flags -E - >/dev/null 2>&1; then
  flags="" kind=plain # another processor, or a compiler that knows no AMX
fi
wheels=${APR_WHEELS:-$HOME/.cache/aprfmt/wheels}/$kind

smoke() {
  "$python" - <<'EOF'
import importlib.util, sys, tempfile
from importlib.resources import as_file, files
from pathlib import Path

if importlib.util.find_spec("llama_cpp") is None:
    sys.exit("it is not installed")
import aprfmt
from aprfmt.llama.client import Llama

tiny = as_file(files("aprfmt.cli") / "demo-tiny.gguf")
with tempfile.TemporaryDirectory() as folder, tiny as model:
    try:
        for mix in ("q4_0", "q8_0"):
            path = Path(folder, f"{mix}.gguf")
            aprfmt.convert_model(model, path, dtype=mix)
            with Llama(path, engines=["llama_cpp"]) as llama:
                llama.generate("The capital of France is")
                if "off" in llama.engine:
                    sys.exit("it dies unless its extra buffers are off")
    except aprfmt.AprError as error:
        sys.exit(str(error))
EOF
}

install() { # of the wheel in the cache
  "$python" -m pip install --quiet --force-reinstall --no-deps "$(ls "$wheels"/llama_cpp_python-"$version"-*.whl | head -n 1)"
  "$python" -m pip install --quiet "llama-cpp-python==$version" # what it depends on
}

build() {
  echo "building llama-cpp-python $version once, some minutes; the wheel is kept in $wheels" >&2
  work=$(mktemp -d "$wheels/.build.XXXX")
  trap 'rm -rf "$work"' EXIT
  "$python" "$(dirname "$0")/fetch_material.py" llama-cpp-python >/dev/null
  tar xzf "${APR_MATERIAL:-$HOME/.cache/aprfmt/material}/llama-cpp-python/source.tar.gz" -C "$work" --strip-components 1 \
    --one-top-level=source
  sed -i 's/LLAMA_BUILD_COMMON ON CACHE/LLAMA_BUILD_COMMON OFF CACHE/' "$work/source/CMakeLists.txt"
  cat >>"$work/source/CMakeLists.txt" <<'EOF'
foreach(part llama mtmd)
  if(TARGET ${part} AND NOT MSVC)
    target_compile_options(${part} PRIVATE -O1)
  endif()
endforeach()
EOF
  CFLAGS="${CFLAGS:-} $flags" CXXFLAGS="${CXXFLAGS:-} $flags" \
    "$python" -m pip wheel --quiet --no-deps --no-cache-dir --wheel-dir "$work" "$work/source"
  mv "$work"/llama_cpp_python-*.whl "$wheels/"
}

if [ "${2:-}" = --wheel ]; then
  mkdir -p "$wheels"
  compgen -G "$wheels/llama_cpp_python-$version-*.whl" >/dev/null || build
  exit 0
fi
if "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('llama_cpp_python') != '$version')" 2>/dev/null && smoke; then
  exit 0
fi
mkdir -p "$wheels"
if compgen -G "$wheels/llama_cpp_python-$version-*.whl" >/dev/null; then
  install && smoke && exit 0
  echo "the wheel in $wheels does not run a model here; it is built again" >&2
  rm -f "$wheels"/llama_cpp_python-"$version"-*.whl
fi
build && install && smoke && exit 0
echo "llama-cpp-python $version does not run a model here" >&2
"$python" -m pip uninstall --quiet --yes llama-cpp-python
exit 1
