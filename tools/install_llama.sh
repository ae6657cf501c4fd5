#!/usr/bin/env bash
# Installs llama-cpp-python into the environment of the given python. It is built from source, some minutes on two
# cores, so the wheel is kept in a cache outside the tree and reused: $APR_WHEELS, else ~/.cache/aprfmt/wheels.
set -euo pipefail
python=${1:-python3}
wheels=${APR_WHEELS:-$HOME/.cache/aprfmt/wheels}
version=0.3.36
if "$python" -c "import llama_cpp, sys; sys.exit(llama_cpp.__version__ != '$version')" 2>/dev/null; then
  exit 0
fi
mkdir -p "$wheels"
if ! compgen -G "$wheels/llama_cpp_python-$version-*.whl" >/dev/null; then
  echo "building llama-cpp-python $version once, some minutes; the wheel is kept in $wheels" >&2
  work=$(mktemp -d "$wheels/.build.XXXX")
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" "llama-cpp-python==$version"
  mv "$work"/llama_cpp_python-*.whl "$wheels/"
fi
"$python" -m pip install --quiet "$(ls "$wheels"/llama_cpp_python-"$version"-*.whl | head -n 1)"
