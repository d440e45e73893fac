#!/usr/bin/env bash
# The tests for a machine with a GPU: `./shardbook test gpu`, `run test gpu` in a
# pack, and in a short form on the emulated GPU, among the tests of every change.
#
#   suite.sh FOLDER      the build folder, or bin/ of a pack
#
# SHARDBOOK_GPU_WRAPPER is a command to run each program under, such as
# "compute-sanitizer --tool memcheck --error-exitcode 1". A program is stopped
# after SHARDBOOK_GPU_TIMEOUT seconds (1800).
set -euo pipefail

folder=$1
list=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/programs.txt
read -r -a wrapper <<<"${SHARDBOOK_GPU_WRAPPER-}"

if ! reason=$("$folder/bench/gpu/gpus" --why 2>&1); then
  if [[ -e /dev/nvidiactl &&
    $reason =~ shared\ (object|libraries)|undefined\ symbol|GLIBC ]]; then
    echo "FAILED: there is a GPU, but $reason"
    exit 2
  fi
  echo "SKIPPED: ${reason:-the program gpus does not run here}"
  exit 0
fi
"$folder/bench/gpu/gpus"

# For programs that would rather have the emulated one.
[[ ${SHARDBOOK_CUDA_LIBRARY-} ]] ||
  export SHARDBOOK_CUDA_LIBRARY=$folder/core/libshardbook_cuda.so
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
log=$scratch/log

# The number in a line of GoogleTest's summary: count_of '[  PASSED  ]'
count_of() {
  local count
  count=$(grep -F -- "$1 " "$log" | grep -Eo '[0-9]+ tests?' | tail -n 1)
  echo "${count%% *}"
}

passed=0 failed=0 skipped=0
while read -r program; do
  [[ -n $program && $program != '#'* ]] || continue
  printf '\n== %s\n' "$program"
  echo 0 >"$scratch/status"
  { timeout --foreground -k 10 "${SHARDBOOK_GPU_TIMEOUT:-1800}" \
      "${wrapper[@]}" "$folder/$program" </dev/null 2>&1 ||
    echo $? >"$scratch/status"; } | tee -- "$log" |
    grep -vE '^\[(-+|=+| RUN +)\]|^(Running main|Note: )|^$' || true
  status=$(<"$scratch/status")
  good=$(count_of '[  PASSED  ]' || true)
  bad=$(count_of '[  FAILED  ]' || true)
  out=$(count_of '[  SKIPPED ]' || true)
  passed=$((passed + ${good:-0}))
  skipped=$((skipped + ${out:-0}))
  if ((status)); then
    failed=$((failed + (${bad:-0} > 0 ? bad : 1)))
    echo "FAILED $program (status $status)"
    tail -n 5 -- "$log"
  fi
done <"$list"

echo
echo "$passed passed, $failed failed$( ((!skipped)) || echo ", $skipped skipped")"
((failed == 0 && passed > 0))
