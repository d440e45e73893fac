#!/usr/bin/env bash
# Builds, runs and tests the book on another release of Debian, notebooks
# included:
#
#   tests/by_hand/debian.sh trixie
#
# The release is installed by debootstrap into a folder of its own, a clean
# clone of the last commit is copied there, and ./shardbook runs in a chroot.
# Needs root, debootstrap and about 5 GB of disk; takes the time of a whole
# build. A second call uses the same installation again.
set -euo pipefail

usage() {
  cat <<'END_OF_USAGE'
Usage: tests/by_hand/debian.sh RELEASE [--jobs N] [--core-only] [--portable]

  RELEASE      bookworm or trixie
  --jobs N     at most N compilers at once (default: all cores)
  --core-only  the tests of core and its kernels, instead of everything
  --portable   compile for any processor, and let oneDNN use AVX2 at most: no
               number on a page may depend on the processor

The installations lie in $SHARDBOOK_DEBIAN, by default the folder
shardbook/debian of the user's cache; remove them to start again. Packages come
from the Debian mirror that this machine uses itself.

Exit status: 0, all tests passed; 1, something failed; 2, a mistake in the
command, or a missing tool.
END_OF_USAGE
}

die() {
  printf 'debian.sh: %s\n' "$*" >&2
  exit 2
}

release=
jobs=$(nproc)
core_only=0
variables=()
while (($#)); do
  case $1 in
    -h | --help)
      usage
      exit
      ;;
    --jobs)
      [[ ${2-} =~ ^[1-9][0-9]{0,3}$ ]] ||
        die "--jobs ${2-}: give a number from 1 up"
      jobs=$2
      shift
      ;;
    --core-only) core_only=1 ;;
    --portable)
      variables=(SHARDBOOK_MESON_OPTIONS=-Dnative=false ONEDNN_MAX_CPU_ISA=AVX2)
      ;;
    bookworm | trixie) release=$1 ;;
    *) die "$1: no such release or option; releases are bookworm and trixie" ;;
  esac
  shift
done
[[ -n $release ]] || die "which release? Give bookworm or trixie"
((EUID == 0)) || die "only root can make a chroot; try sudo"
for tool in debootstrap git setpriv unshare chroot; do
  command -v "$tool" >/dev/null || die "$tool is missing; install it"
done

checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
folder=${SHARDBOOK_DEBIAN:-${XDG_CACHE_HOME:-$HOME/.cache}/shardbook/debian}
root=$folder/$release
log=$folder/$release.log
mkdir -p -- "$folder/ccache-$release"

# The first archive of Debian that this machine takes packages from; those of
# security updates have other releases.
mirror() {
  { sed -n 's/^deb \(\[[^]]*\] \)\?\(http[^ ]*\) .*/\2/p' \
      /etc/apt/sources.list /etc/apt/sources.list.d/*.list
    sed -n 's/^URIs: *\(http[^ ]*\).*/\1/p' /etc/apt/sources.list.d/*.sources
  } 2>/dev/null | grep '/debian/*$' | head -n 1
}

# 1. Install the release, once.
if [[ ! -f $root/.installed ]]; then
  archive=$(mirror) || die "no Debian mirror in /etc/apt/sources.list*"
  rm -rf -- "$root"
  echo "installing $release into $root ..."
  debootstrap --variant=minbase "$release" "$root" "$archive" >"$log" 2>&1 || {
    tail -n 5 -- "$log" >&2
    echo "debian.sh: debootstrap failed; all of it is in $log" >&2
    exit 1
  }
  touch -- "$root/.installed"
fi
cp -- /etc/resolv.conf "$root/etc/resolv.conf"

# 2. A clean clone, without what an earlier run built.
rm -rf -- "$root/book"
git clone --quiet --no-hardlinks -- "$checkout" "$root/book"
# Its owner inside is root, whoever owns the checkout.
chown -R 0:0 "$root/book"

# 3. Run it. Mounts and processes live in namespaces of their own, which end
# with this script, however it ends: unshare is killed when its parent dies, and
# kills what it started.
commands='./shardbook run --jobs "$1" &&
  ./shardbook notebook --execute --jobs "$1" &&
  ./shardbook test --jobs "$1"'
if ((core_only)); then commands='./shardbook test --jobs "$1" core kernels'; fi
inside='set -e
  mount -t proc proc "$1/proc"
  mount --rbind /sys "$1/sys"
  mount --rbind /dev "$1/dev"
  mount -t tmpfs tmpfs "$1/dev/shm"
  mkdir -p "$1/root/.cache/ccache"
  mount --bind "$2" "$1/root/.cache/ccache"
  exec chroot "$1" /usr/bin/env -i HOME=/root LANG=C.UTF-8 \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "${@:5}" sh -c "cd /book && $4" sh "$3"'
status=0
setpriv --pdeathsig KILL \
  unshare --mount --propagation private --pid --fork --kill-child \
  bash -c "$inside" bash "$root" "$folder/ccache-$release" "$jobs" "$commands" \
  "${variables[@]}" ||
  status=$?
if ((status == 0)); then
  echo "$release: passed"
else
  echo "$release: failed with status $status"
  exit 1
fi
