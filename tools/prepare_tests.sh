#!/usr/bin/env bash
# The environment of the suite, around the given python: its packages, and beside their download what takes as long:
# llama-cpp-python's build, real material, Chromium. Without one of these three, tests are skipped and say so.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
jobs=()

tools/install_chromium.sh & jobs+=($!)
"$python" tools/fetch_material.py >/dev/null & jobs+=($!)
nice tools/install_llama.sh "$python" --wheel & jobs+=($!)
"$python" -m pip install --quiet -e ".[test]"
wait "${jobs[@]}" || true # each has said why
tools/install_llama.sh "$python" || echo "without llama-cpp-python: tests that compare with it are skipped" >&2
