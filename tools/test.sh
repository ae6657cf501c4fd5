#!/usr/bin/env bash
# The whole suite with the given python and further words for pytest; then what needs a GPU, where there is one.
#
# Temporary files go to memory where /dev/shm has room for them. If TMPDIR names a folder, only the tests that write most
# bytes use memory (tests/support/in_memory.py). Each run has folders of its own, which are removed at the end; if a test
# failed, by the next run. FULL=1 runs every case of the longest tables.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

free_kib() { df --output=avail -k "$1" 2>/dev/null | tail -n 1; }
memory_kib() { awk '/^MemAvailable/ { print $2 }' /proc/meminfo 2>/dev/null || echo 0; }
gib=$((1024 * 1024))
memory=
if [ -w /dev/shm ] && [ "$(free_kib /dev/shm)" -gt $((8 * gib)) ] && [ "$(memory_kib)" -gt $((12 * gib)) ]; then
  memory=/dev/shm
fi

# Prints a new folder of this run in the folder $1, where those of ended runs are removed.
own_folder() {
  local runs old
  runs="$1/aprfmt-tests-$(uname -n | cut -c -16)"
  for old in "$runs"-*; do
    if [ -O "$old" ] && ! kill -0 "${old##*-}" 2>/dev/null; then
      chmod -R u+w "$old" || true # a failed test may leave read-only folders
      rm -rf "$old" || true
    fi
  done
  rm -rf "$runs-$$"
  mkdir -m 711 "$runs-$$" # tests of permissions act as another user
  echo "$runs-$$"
}

folders=()
if [ -n "${TMPDIR:-}" ] && [ -n "$memory" ]; then
  APR_TEST_MEMORY=$(own_folder "$memory")
  export APR_TEST_MEMORY
  folders+=("$APR_TEST_MEMORY")
fi
TMPDIR=$(own_folder "${TMPDIR:-${memory:-/tmp}}")
export TMPDIR
folders+=("$TMPDIR")
finish() {
  if [ $? = 0 ]; then rm -rf "${folders[@]}" || true; else echo "temporary files: ${folders[*]}" >&2; fi
}
trap finish EXIT

# Hundreds of processes import the package: each would compile it.
export PYTHONDONTWRITEBYTECODE=
# Two workers keep two cores busy: threads beside them would only wait for each other, and spin while they do.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1}
CUDA_VISIBLE_DEVICES="" APR_FULL=${FULL:-} "$python" -m pytest -q -n "${JOBS:-2}" --dist loadfile --no-loadscope-reorder "$@"
# What a GPU is needed for runs in a process that forks no other: torch cannot go on in a fork where there is a GPU.
if "$python" -c "import torch; raise SystemExit(not torch.cuda.is_available())"; then
  "$python" -m pytest -q -m cuda tests/train
fi
