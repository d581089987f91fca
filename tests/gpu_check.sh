#!/usr/bin/env bash
# Everything that needs a Hopper GPU, in one run of at most nine minutes, with nothing to download.
#
#   tests/gpu_check.sh LOGS
#
# Builds; runs streams, graphs and large caches, the op tests on CUDA, the engine's graphs, a short bench, and compute-sanitizer on a subset.
# Every step has its own log in the folder LOGS and its own time limit; a step that fails stops no other. The summary goes
# to the terminal and to LOGS/summary.txt. Exit status: 0 if every step passed, 1 if one failed or could not run, 2 if
# there is nothing to run on. PYTHON names the interpreter (python3), JOBS the processes at once (all cores).
# REHEARSAL=1 goes through the steps without a GPU, to try this script: tests skip what needs one, and the exit status is
# never 0.
set -uo pipefail
if [ $# -ne 1 ]; then
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(nproc)}
mkdir -p "$1" || exit 2
LOGS=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
SUMMARY=$LOGS/summary.txt
: > "$SUMMARY"
START=$SECONDS
TOTAL=530 # seconds for all steps; the rest of nine minutes is for starting and stopping
failed=0

say() { echo "$*" | tee -a "$SUMMARY"; }
has() { "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2> /dev/null; }

# step NAME LIMIT COMMAND...: runs it with its output in LOGS/NAME.log, for LIMIT seconds or what is left of them.
step() {
  local name=$1 limit=$2 begin=$SECONDS status left
  shift 2
  left=$((TOTAL - (SECONDS - START)))
  [ "$limit" -gt "$left" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    say "FAILED   $name: no time left"
    failed=1
    return 1
  fi
  timeout -k 5 "$limit" "$@" > "$LOGS/$name.log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    say "passed   $name ($((SECONDS - begin)) s)"
    return 0
  fi
  failed=1
  [ $status -eq 124 ] || [ $status -eq 137 ] && status="the limit of $limit s"
  say "FAILED   $name ($((SECONDS - begin)) s, exit status $status): $LOGS/$name.log"
  tail -n 5 "$LOGS/$name.log" | sed 's/^/         | /' | tee -a "$SUMMARY"
  return 1
}

missing() {
  say "missing  $1: $2"
  [ "${3:-}" = optional ] || failed=1
}

describe_machine() {
  nvidia-smi || echo "nvidia-smi: not found"
  nvcc --version || echo "nvcc: not on PATH"
  compute-sanitizer --version || echo "compute-sanitizer: not on PATH"
  "$PYTHON" - << 'END'
import importlib.metadata, platform, sys

print("python", sys.version, sys.executable, platform.platform())
for name in ("torch", "triton", "numpy", "pytest", "pytest-xdist", "pybind11", "ninja", "setuptools"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print(name, "is not installed")
import torch

print("CUDA of torch", torch.version.cuda)
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
END
}
export -f describe_machine
export PYTHON

# step for tests: those that were skipped for want of the GPU that is here have shown nothing.
test_step() {
  local name=$1
  step "$@" || return
  say "         | $(tail -n 1 "$LOGS/$name.log")"
  if [ "${REHEARSAL:-}" != 1 ] && grep -q "needs a Hopper GPU" "$LOGS/$name.log"; then
    say "FAILED   $name: tests found no Hopper GPU: $LOGS/$name.log"
    failed=1
  fi
}

run_pytest() {
  local name=$1 limit=$2
  shift 2
  if ! has pytest; then
    missing "$name" "$PYTHON has no pytest"
    return
  fi
  test_step "$name" "$limit" "$PYTHON" -m pytest -q -rs -p no:cacheprovider "$@"
}

# Whether compute-sanitizer is here and works; where it does not know the device, that is no fault of the kernels.
probe_sanitizer() {
  if ! command -v compute-sanitizer > /dev/null; then
    missing sanitizer "compute-sanitizer is not on PATH" optional
    return 1
  elif ! has pytest; then
    missing sanitizer "$PYTHON has no pytest"
    return 1
  fi
  timeout 60 compute-sanitizer "$PYTHON" -c "import torch; torch.zeros(1, device='cuda')" > "$LOGS/sanitizer.log" 2>&1
  if grep -q "Device not supported" "$LOGS/sanitizer.log"; then
    missing sanitizer "compute-sanitizer does not support this device" optional
    return 1
  fi
}

sanitize() {
  local name=$1 limit=$2 tool=$3 tests=$4
  test_step "$name" "$limit" compute-sanitizer --tool "$tool" --error-exitcode 9 --kernel-name-exclude kernel_substring=at:: \
    "$PYTHON" -m pytest -q -rs -x -p no:cacheprovider tests/ops/test_gpu.py -k "$tests"
}

build() {
  if ! has setuptools; then
    missing build "$PYTHON has no setuptools, which setup.py needs"
  elif ! has pybind11 && ! [ -d "$TORCH/include/pybind11" ]; then
    missing build "$PYTHON has no pybind11, and torch brings no headers of it"
  elif ! has ninja && ! command -v ninja > /dev/null; then
    missing build "there is no ninja, neither as a package of $PYTHON nor on PATH"
  else
    step build 260 env PAGEDKERN_CUDA=1 PAGEDKERN_JOBS="$JOBS" "$PYTHON" setup.py build_ext --inplace
  fi
}

if ! has torch; then
  say "there is no torch for $PYTHON: nothing can be built or run (PYTHON=... names another interpreter)"
  exit 2
fi
TORCH=$("$PYTHON" -c "import os, torch; print(os.path.dirname(torch.__file__))")
if ! "$PYTHON" -c "import sys, torch.cuda as c; sys.exit(not (c.is_available() and c.get_device_capability()[0] == 9))"; then
  if [ "${REHEARSAL:-}" != 1 ]; then
    say "torch sees no Hopper GPU here: nothing was run"
    exit 2
  fi
  say "REHEARSAL: there is no Hopper GPU, so that tests skip what needs one"
  failed=1
fi

parallel=() # the op tests on as many processes as there are cores, where pytest-xdist is there
if has xdist; then parallel=(-n "$JOBS"); fi

step machine 60 bash -c describe_machine
build
run_pytest gpu_only 90 tests/ops/test_gpu.py
run_pytest ops 160 "${parallel[@]}" --backend cuda -k cuda --ignore tests/ops/test_large.py tests/ops
if has tokenizers && has safetensors && has gguf && has jinja2 && has transformers; then
  run_pytest engine 60 tests/engine/test_capture.py -k "cuda or triton"
else
  missing engine "$PYTHON lacks what pagedkern[engine] and its tests need" optional
fi
if has pytest; then
  step bench_cache 60 "$PYTHON" bench/bench_cache_ops.py --device cuda
else
  missing bench_cache "$PYTHON has no pytest, which bench/bench_cache_ops.py imports"
fi
step bench_decode 60 "$PYTHON" bench/bench_paged_attention.py decode cuda
if probe_sanitizer; then
  # Each tensor in an allocation of its own, so that an access past its end is seen: not where a graph is captured.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 sanitize memcheck 60 memcheck "current_stream or check_mode"
  sanitize memcheck_graphs 60 memcheck "follows or many_"
  sanitize racecheck 60 racecheck "current_stream or many_"
fi
run_pytest resources 120 tests/build/test_resources.py

say "$((SECONDS - START)) s in all, logs in $LOGS"
exit $failed
