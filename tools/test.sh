#!/usr/bin/env bash
# The whole suite with the given python and further words for pytest; then what needs a GPU, where there is one.
#
# Temporary files go to memory where /dev/shm has room for them, unless TMPDIR names a folder. Each run has a folder of
# its own there, which is removed at the end; if a test failed, by the next run. FULL=1 runs every case of the longest
# tables.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift

free_kib() { df --output=avail -k "$1" 2>/dev/null | tail -n 1; }
memory_kib() { awk '/^MemAvailable/ { print $2 }' /proc/meminfo 2>/dev/null || echo 0; }
gib=$((1024 * 1024))
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ] && [ "$(free_kib /dev/shm)" -gt $((8 * gib)) ] && [ "$(memory_kib)" -gt $((12 * gib)) ]; then
  TMPDIR=/dev/shm
fi

runs="${TMPDIR:-/tmp}/aprfmt-tests-$(uname -n | cut -c -16)"
for old in "$runs"-*; do
  if [ -O "$old" ] && ! kill -0 "${old##*-}" 2>/dev/null; then
    chmod -R u+w "$old" || true # a failed test may leave read-only folders
    rm -rf "$old" || true
  fi
done
export TMPDIR="$runs-$$"
rm -rf "$TMPDIR"
mkdir -m 711 "$TMPDIR" # tests of permissions act as another user
finish() {
  if [ $? = 0 ]; then rm -rf "$TMPDIR" || true; else echo "temporary files: $TMPDIR" >&2; fi
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
