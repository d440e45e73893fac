#!/usr/bin/env bash
# Starts what is in this folder; README.txt lists the commands.
set -euo pipefail
here=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd -P)

die() {
  printf 'run: %s\n' "$*" >&2
  exit 2
}

# ---- The C library: that of the machine, as new as the programs need.

glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null || true)
glibc=${glibc##* } needed=$(<"$here/glibc")
if [[ $glibc ]] &&
  [[ $(printf '%s\n' "$glibc" "$needed" | sort -V | head -n 1) != "$needed" ]]
then
  die "this system has glibc $glibc, and the programs need $needed; build the" \
    "pack on an older system"
fi

# ---- Libraries: ours, then CUDA's from wherever they are.

# Folders of NVIDIA's packages for Python, which PyTorch brings along.
python_folders() {
  local python=${SHARDBOOK_PYTHON:-python3}
  command -v "$python" >/dev/null || return 0
  "$python" - <<'END' 2>/dev/null || true
import glob
import site
import sys

places = list(dict.fromkeys([*getattr(site, "getsitepackages", list)(),
                             site.getusersitepackages(), *sys.path]))
for place in places:
    for folder in sorted(glob.glob(f"{place}/nvidia/*/lib")):
        print(folder)
END
}

folders=("$here/lib")
for folder in "${CUDA_HOME:-/usr/local/cuda}"/lib64 /usr/local/cuda-*/lib64 \
  /opt/cuda/lib64; do
  [[ ! -d $folder ]] || folders+=("$folder")
done
mapfile -t found < <(python_folders)
folders+=("${found[@]}")
original=${LD_LIBRARY_PATH-}
LD_LIBRARY_PATH=$(IFS=:; echo "${folders[*]}")${original:+:$original}
export LD_LIBRARY_PATH

# ---- The commands.

case ${1-help}${2+ $2} in
  doctor) exec "$here/bin/bench/gpu/gpus" ;;
  "test gpu" | test) exec bash "$here/suite.sh" "$here/bin" ;;
  "bench gpu" | bench)
    # PyTorch has libraries of its own
    exec env SHARDBOOK_PYTORCH_LIBRARIES="$original" \
      "$here/bin/bench/gpu/gpu_bench" \
      --pytorch "$here/pytorch/pytorch_gpu.py" "${@:3}"
    ;;
  help | -h | --help) exec cat -- "$here/README.txt" ;;
esac
for program in "$here"/bin/chapters/*"${1//-/_}"*/ch*; do
  [[ ! -x $program ]] || exec "$program" "${@:2}"
done
die "$1: no such command; there are doctor, test gpu, bench gpu and the chapters"
