#!/bin/sh
# What needs a GPU, on a bare machine: Python with torch for CUDA, wheels of the rest in a folder, no network.
#
#     tools/gpu_check.sh WHEELS [STAGE ...]
#
# Stages: install, test, noquack, bench, bench7; without a name all of them, in this order. Packages go to SITE
# (default /tmp/site/site-packages) and stay there for the next call. With OUT set, JUnit and JSON files are written
# to that folder. The exit status is that of the first stage that fails.
set -eu
cd "$(dirname "$0")/.."
wheels=$1
shift
[ $# -gt 0 ] || set -- install test noquack bench bench7
python=${PYTHON:-python3}
site=${SITE:-/tmp/site/site-packages}
out=${OUT:-/tmp/gpu_check}
mkdir -p "$site" "$out"
# The DSL names its second folder in a .pth file, which Python does not read in a folder of PYTHONPATH.
export PYTHONPATH="$PWD/src:$PWD/tools:$site:$site/nvidia_cutlass_dsl/dsl_packages" PYTHONUNBUFFERED=1

install() {
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
    "$python" -m aprtrain.features
}

checked() { # NAME ARGUMENTS: pytest, whose passes are listed by number alone
    name=$1
    shift
    "$python" -m pytest -q -p no:cacheprovider -p no:randomly --junitxml "$out/$name.xml" "$@"
}

run_stage() {
    case $1 in
    install) install ;;
    test) checked test -m cuda tests/train ;;
    noquack)
        blocked=$(mktemp -d)
        mkdir "$blocked/quack"
        echo 'raise ImportError("quack is blocked by gpu_check")' >"$blocked/quack/__init__.py"
        (
            export PYTHONPATH="$blocked:$PYTHONPATH"
            "$python" tools/bench_train.py --micro 32768 --teachers 1.5b --residencies bf16 --documents \
                --json "$out/noquack.json"
            checked noquack -m cuda tests/train/test_features_cuda.py tests/train/kernels/test_gated_cuda.py \
                -k "not feed_forward and not taken_where"
        )
        rm -r "$blocked"
        ;;
    bench)
        "$python" tools/bench_train.py --micro 32768 --teachers 1.5b --documents 1500 --json "$out/bench.json"
        ;;
    bench7)
        "$python" tools/bench_train.py --micro 16384 --teachers 7b --residencies bf16 fp8 --json "$out/bench7.json"
        ;;
    *)
        echo "unknown stage: $1" >&2
        exit 5
        ;;
    esac
}

for stage in "$@"; do
    echo "== $stage"
    run_stage "$stage"
done
