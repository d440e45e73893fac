# The packages that the book needs from Debian or Ubuntu: what they are, how
# apt-get installs the missing ones, and what `./shardbook doctor` prints.
# And the ninja and the number of jobs of a build. ./shardbook sources this
# file, which uses its variables root, build and no_install, and its functions
# say and die.
# shellcheck shell=bash disable=SC2154

# A package `for` test, bench, notebook, explore or book is installed when that
# command is first asked for; `compare` ones never are. The site compiles nothing:
# `book` alone needs none of those `for` all.
package_table() {
  # Debian 12 has an older xeus, which needs no more.
  local not_here='/^$/d'
  ! grep -q '^VERSION_CODENAME=bookworm' /etc/os-release 2>/dev/null ||
    not_here='/^xeus-zmq-dev /d'
  sed -e '/^#/d' -e "$not_here" <<'END'
# package           need      for      what it adds
g++                 required  all      the C++20 compiler
meson               required  all      the build system
ninja-build         required  all      runs what Meson plans
pkg-config          required  all      tells Meson where libraries are
libdnnl-dev         required  all      oneDNN: fast matrix products
libxsimd-dev        required  all      vector instructions of the kernels
libxtensor-dev      required  all      tensors as array expressions, .npy files
nlohmann-json3-dev  required  all      reads and writes JSON
libfmt-dev          required  all      formats numbers and messages
libcli11-dev        required  all      reads the options of the programs
zlib1g-dev          required  all      compresses the timelines of report.html
libboost-context-dev required all      fibers: thousands of ranks in one thread
libgloo-dev         optional  all      ranks as processes: --backend gloo
ccache              optional  all      builds again in seconds
libgtest-dev        required  test     GoogleTest, which every test uses
libgmock-dev        required  test     GoogleTest's matchers
redis-server        optional  test     the tests of Gloo's Redis rendezvous
iproute2            optional  test     the test of two hosts (when run as root)
chromium            optional  test     the tests of report.html in a browser
libbenchmark-dev    required  bench    Google Benchmark
xeus-dev            required  notebook the protocol between Jupyter and a kernel
xeus-zmq-dev        optional  notebook its sockets, where xeus is version 5
llvm-19-dev         required  notebook compiles cells while the kernel runs
libclang-19-dev     required  notebook the same for C++
libclang-cpp19-dev  required  notebook the same, as one library
libclang-common-19-dev required notebook the compiler's own headers
python3-nbclient    required  notebook executes notebooks from a script
jupyter-notebook    optional  notebook opens notebooks in a browser
emscripten          required explore  compiles the planner for browsers, 0.8 to 1.6 GB
python3-sphinx      required book     turns pages into the site: 210 MB with the next two
python3-myst-parser required book     reads their Markdown
katex               required book     renders their formulas
doxygen             optional book     finds the names of the API, up to 250 MB
python3-torch       optional  compare  ./shardbook bench pytorch
END
}

# ---- What is installed

# The packages of the table that dpkg has, with their versions, one per line.
# Meson also looks for NCCL, cuDNN and hiredis (behind Gloo), which only some
# systems have.
installed=
look_up_packages() {
  local names
  names=$(package_table | cut -d ' ' -f 1)
  # shellcheck disable=SC2086  # one word per package
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package} ${Version}\n' \
    $names libnccl-dev 'libcudnn*-dev*' libhiredis-dev 2>/dev/null |
    sed -n 's/^installed //p' || true)
}

# CUDA is found where it is installed, and never installed from here. Meson looks
# in the same places.
[[ -z ${CUDA_HOME-} ]] || PATH=$PATH:$CUDA_HOME/bin
find_nvcc() {
  command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true
}

cuda_version() {
  "$1" --version 2>/dev/null | sed -n 's/^.*release \([^,]*\),.*/CUDA \1/p'
}

# What Meson may find of CUDA: the compiler, and libraries in its folder.
look_up_cuda() {
  local nvcc
  nvcc=$(find_nvcc)
  [[ -n $nvcc ]] || return 0
  printf '%s, %s\n' "$nvcc" "$(cuda_version "$nvcc")"
  ls "${nvcc%/bin/nvcc}"/lib64/lib{cudnn,nccl}.so 2>/dev/null || true
}

# Prints the rows of the table that a command wants and dpkg does not have. The
# command * stands for all.
missing_packages() {
  local command=$1 package need scope reason
  while read -r package need scope reason; do
    # shellcheck disable=SC2053  # a pattern
    [[ $scope == $command || ($scope == all && $command != book) ]] || continue
    [[ $'\n'$installed == *$'\n'"$package "* ]] && continue
    printf '%s %s %s\n' "$package" "$need" "$reason"
  done < <(package_table)
}

list_packages() {
  local package need reason
  while read -r package need reason; do
    printf '  %-19s %-9s %s\n' "$package" "$need" "$reason" >&2
  done <<<"$1"
}

# Names packages that stay missing, and why. A required one ends the command.
do_without() {
  local why=$1 missing=$2
  say "$why:"
  list_packages "$missing"
  if grep -q '^[^ ]* required ' <<<"$missing"; then
    die "a required package is missing; install it and try again"
  fi
}

# ---- Installation

# Why apt-get cannot be used here; empty when it can.
apt_obstacle() {
  if ((no_install)); then
    echo "--no-install was given"
  elif ! command -v apt-get >/dev/null; then
    echo "this system has no apt-get"
  elif ((EUID != 0)) && ! command -v sudo >/dev/null; then
    echo "this needs root, and there is no sudo"
  elif ((EUID != 0)) && [[ ! -t 0 ]] && ! sudo -n true 2>/dev/null; then
    echo "this needs root, and sudo wants a password"
  fi
}

# apt-get in the foreground: it (or sudo) may have a question on a terminal.
apt() {
  local log=$root/build/apt.log
  set -- env DEBIAN_FRONTEND=noninteractive apt-get -q "$@"
  ((EUID == 0)) || set -- sudo "$@"
  mkdir -p "$root/build"
  if [[ -t 2 ]]; then
    "$@" >&2
  else
    "$@" >"$log" 2>&1 </dev/null || { tail -n 5 -- "$log" >&2; return 1; }
  fi
}

known_to_apt() { [[ -n $(apt-cache show -- "$1" 2>/dev/null) ]]; }

# Installs what it can. Lists that are empty or old are fetched once.
apt_install() {
  local package known=() updated=0
  for package; do
    known_to_apt "$package" && continue
    apt update || true
    updated=1
    break
  done
  for package; do
    if known_to_apt "$package"; then known+=("$package"); fi
  done
  ((${#known[@]})) || return 1
  apt install -y --no-install-recommends "${known[@]}" && return
  ((updated)) && return 1
  apt update && apt install -y --no-install-recommends "${known[@]}"
}

# Installs what `command` needs and does not have.
check_packages() {
  local command=$1 missing required optional obstacle tried
  if ! command -v dpkg-query >/dev/null; then
    say "This system has no dpkg; Meson will say which libraries are missing."
    return
  fi
  # An optional package that could not be installed is not tried each time.
  tried=$root/build/.not-installed
  look_up_packages
  missing=$(missing_packages "$command")
  if [[ -f $tried ]] && ((!no_install)); then
    missing=$(grep -vxFf "$tried" <<<"$missing" || true)
  fi
  [[ -n $missing ]] || return 0

  obstacle=$(apt_obstacle)
  if [[ -n $obstacle ]]; then
    do_without "Not installed ($obstacle)" "$missing"
    return
  fi
  say "apt-get installs what is missing:"
  list_packages "$missing"
  mapfile -t required < <(sed -n 's/ required .*//p' <<<"$missing")
  mapfile -t optional < <(sed -n 's/ optional .*//p' <<<"$missing")
  if ! apt_install "${required[@]}" "${optional[@]}"; then
    ((${#required[@]} == 0)) || apt_install "${required[@]}" || true
  fi

  look_up_packages
  missing=$(missing_packages "$command")
  [[ -n $missing ]] || return 0
  do_without "apt-get could not install" "$missing"
  mkdir -p "$root/build"
  printf '%s\n' "$missing" >>"$tried"
}

# ---- What builds

# The ninja that has built here goes on as long as it is there: one of another
# version does not read its log, and would build all again. Meson runs it, too.
choose_ninja() {
  local record=$build/.ninja ninja=
  [[ ! -f $record ]] || ninja=$(<"$record")
  if [[ -x $ninja ]]; then
    export NINJA=$ninja
    return
  elif [[ -n $ninja ]]; then
    say "$ninja, which has built in ${build#"$root"/}/, is gone;" \
      "another ninja may build all again"
  elif [[ -f $build/.ninja_log ]]; then
    # Built before there was a record: the package's is likelier than another
    ninja=$(type -aP ninja | grep -x /usr/bin/ninja || true)
  fi
  [[ -x $ninja ]] || ninja=$(type -P ninja || true)
  printf '%s\n' "$ninja" >"$record"
  export NINJA=$ninja
}

# As many compilers as cores, but no more than one per GiB of free memory.
default_jobs() {
  local cores gib
  cores=$(nproc)
  gib=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
  echo $((cores < gib ? cores : gib < 1 ? 1 : gib))
}

# ---- Doctor

# The Python that can import a module, or nothing.
find_python() {
  local module=$1 python
  for python in ${SHARDBOOK_PYTHON:+"$SHARDBOOK_PYTHON"} python3 \
    /usr/bin/python3; do
    if "$python" -c "import $module" >/dev/null 2>&1; then
      echo "$python"
      return
    fi
  done
}

print_machine() {
  printf 'machine   %s, %s cores, %s GiB memory (%s GiB free)\n' \
    "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)" \
    "$(nproc)" \
    "$(awk '/^MemTotal/ {printf "%.0f", $2 / 1048576}' /proc/meminfo)" \
    "$(awk '/^MemAvailable/ {printf "%.0f", $2 / 1048576}' /proc/meminfo)"
  printf 'system    %s, %s\n' \
    "$(sed -n 's/^PRETTY_NAME="*\([^"]*\).*/\1/p' /etc/os-release)" \
    "$(uname -sr)"
  printf 'compiler  %s\n' "$("${CXX:-g++}" --version 2>/dev/null | head -n 1 ||
    echo "none: install g++")"
}

print_packages() {
  local package need scope reason version
  if ! command -v dpkg-query >/dev/null; then
    printf 'packages  unknown: this system has no dpkg\n'
    return
  fi
  printf 'packages\n'
  while read -r package need scope reason; do
    version=$(sed -n "s/^$package //p" <<<"$installed" | head -n 1)
    if [[ -n $version ]]; then
      printf '  has    %-22s %s\n' "$package" "$version"
    else
      [[ $scope == all || $scope == compare ]] || need+=" for $scope"
      printf '  lacks  %-22s %s; it adds: %s\n' "$package" "$need" "$reason"
    fi
  done < <(package_table)
}

print_torch() {
  local python version
  python=$(find_python torch)
  if [[ -n $python ]]; then
    version=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null)
    printf 'pytorch   %s, in %s\n' "$version" "$python"
  else
    printf 'pytorch   no Python here can import torch; it adds %s\n' \
      "./shardbook bench pytorch"
  fi
}

print_gpus() {
  local nvcc
  nvcc=$(find_nvcc)
  if [[ -n $nvcc ]]; then
    printf 'cuda      %s, %s\n' "$nvcc" "$(cuda_version "$nvcc")"
  else
    printf 'cuda      no nvcc in the PATH or in /usr/local/cuda; %s\n' \
      "CUDA would add --device cuda to the build"
  fi
  if [[ -x $build/bench/gpu/gpus ]]; then
    "$build/bench/gpu/gpus" || true
  else
    printf 'gpus      unknown before ./shardbook test gpu or bench gpu %s\n' \
      "has built the program that asks"
  fi
}

print_build() {
  local gloo=without kernel=without
  if [[ -f $build/compile_commands.json ]]; then
    ! grep -q libgloo -- "$build/build.ninja" || gloo=with
    ! grep -q '/shardbook_kernel:' -- "$build/build.ninja" || kernel=with
    printf 'build     build/, %s Gloo, %s the kernel of the notebooks\n' \
      "$gloo" "$kernel"
  else
    printf 'build     none yet; ./shardbook run makes it\n'
  fi
}

# Lines of at most 80 columns: what is left of a row goes below its last column.
fold_rows() {
  awk '{
    indent = sprintf("%" (/^ / ? 32 : 10) "s", "")
    while (length($0) > 80 &&
           match(substr($0, 1, 81), / [^ ]*$/) > length(indent)) {
      print substr($0, 1, RSTART - 1)
      $0 = indent substr($0, RSTART + 1)
    }
    print
  }'
}

# Status 2 when ./shardbook run itself lacks a package.
command_doctor() {
  local missing='' lacking='' obstacle=''
  if command -v dpkg-query >/dev/null; then
    look_up_packages
    missing=$(missing_packages '*')
    lacking=$(missing_packages all | sed -n 's/ required .*//p' |
      paste -s -d ' ')
    obstacle=$(apt_obstacle)
  fi
  {
    print_machine
    print_packages
    print_torch
    print_gpus
    print_build
  } | fold_rows
  [[ -z $missing ]] ||
    printf 'To install all that is missing: apt-get install %s\n' \
      "$(cut -d ' ' -f 1 <<<"$missing" | paste -s -d ' ')"
  if [[ -z $lacking && -e $build/runs/last ]]; then
    printf 'Next: open build/report.html, or ./shardbook lesson ddp\n'
  elif [[ -z $lacking ]]; then
    printf 'Next: ./shardbook run\n'
  elif [[ -z $obstacle ]]; then
    printf 'Next: ./shardbook run, which installs what it lacks\n'
  else
    printf 'Next: install %s (not done from here: %s), then ./shardbook run\n' \
      "$lacking" "$obstacle"
  fi
  [[ -z $lacking ]] || return 2
}
