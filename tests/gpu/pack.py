"""Writes the folder of ./shardbook test gpu --pack: what a machine with a GPU
needs to run the suite and the benchmark, and nothing that it has.

  bin/      programs and our libraries, where the build has them: the paths
            between them ($ORIGIN in their RUNPATH) stay as they are
  lib/      shared libraries that a machine with a driver, CUDA and NCCL lacks
  run       starts them; `run help` lists what it does

What belongs to the C library, to NVIDIA's driver or to CUDA is the machine's
own. libstdc++ and libgomp go along: programs need those of the compiler that
built them, or newer, and a machine's own may be older.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(
    os.path.abspath(__file__))))

# Of the machine: the C library and its loader, the driver, CUDA, NCCL.
OF_MACHINE = re.compile(
    r"(linux-vdso|ld-linux.*|libc|libm|libdl|libpthread|librt|libresolv|libutil"
    r"|libanl|libcuda|libcudart|libcublas|libcublasLt|libcudnn.*|libnccl"
    r"|libnvrtc.*|libnvJitLink|libnvidia-.*)\.so[.0-9]*")
# Texts that `run` and the programs read, under their names in the pack.
TEXTS = {
    "tests/gpu/suite.sh": "suite.sh",
    "tests/gpu/programs.txt": "programs.txt",
    "tests/gpu/pack_run.sh": "run",
    "tests/gpu/pack_readme.txt": "README.txt",
    "bench/gpu/pytorch_gpu.py": "pytorch/pytorch_gpu.py",
    "tests/pytorch/gpt.py": "pytorch/gpt.py",
    "tests/pytorch/resnet.py": "pytorch/resnet.py",
    "tests/pytorch/safetensors_file.py": "pytorch/safetensors_file.py",
    "LICENSE": "LICENSE",
}
LARGEST_BYTES = 50 * 2**20
CUDA_LIBRARY = "core/libshardbook_cuda.so"
MACHINE_CODE = 2  # of an entry; PTX is 1


def say(text):
    sys.stderr.write(text + "\n")


def needed_by(file, environment=None):
    """Pairs of a shared library's name and its path here (None: not found)."""
    listing = subprocess.run(["ldd", file], stdout=subprocess.PIPE, text=True,
                             check=True, env=environment).stdout
    for line in listing.splitlines():
        if match := re.match(r"\s*(\S+) => (?:(/\S+) \(|(not found))", line):
            yield match[1], match[2]


def collect(build, names):
    """{name: path} of the libraries to take along, and our own, by path."""
    taken, own, missing = {}, {}, set()
    for name in names:
        for library, path in needed_by(os.path.join(build, name)):
            if OF_MACHINE.fullmatch(library):
                continue
            if path is None:
                missing.add(library)
            elif os.path.realpath(path).startswith(build + os.sep):
                own[library] = os.path.realpath(path)
            else:
                taken[library] = os.path.realpath(path)
    if missing:
        sys.exit("shardbook: test gpu --pack: not found here: "
                 + ", ".join(sorted(missing)))
    return taken, own


def put(source, target, strip=True):
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy(source, target)
    if strip:
        subprocess.run(["strip", "--strip-unneeded", target], check=True)


def newest_glibc(files):
    """The C library's version that the files need, such as (2, 36)."""
    found = {(2, 0)}
    for file in files:
        text = subprocess.run(["objdump", "-T", file], stdout=subprocess.PIPE,
                              text=True, check=True).stdout
        found |= {tuple(map(int, each.split(".")))
                  for each in re.findall(r"\bGLIBC_([0-9.]+)\b", text)}
    return max(found)


def all_files(folder):
    return [os.path.join(path, name)
            for path, _, names in os.walk(folder) for name in names]


def compress(folder):
    """The folder as an archive beside it; returns its path."""
    base = folder.rstrip("/")
    kinds = [("zstd", ["zstd", "-19", "-T0", "-q"], ".tar.zst"),
             ("xz", ["xz", "-9", "-T2"], ".tar.xz")]
    for program, command, ending in kinds:
        if shutil.which(program):
            break
    archive = base + ending
    with open(archive, "wb") as output:
        tar = subprocess.Popen(
            ["tar", "-C", os.path.dirname(base) or ".", "-c", "--sort=name",
             "--owner=0", "--group=0", os.path.basename(base)],
            stdout=subprocess.PIPE)
        subprocess.run([*command, "-c"], stdin=tar.stdout, stdout=output,
                       check=True)
    if tar.wait():
        sys.exit("shardbook: test gpu --pack: tar failed")
    return archive


def fill(build, names, folder):
    """Copies the programs and what they need; returns the libraries taken."""
    taken, own = collect(build, names)
    paths = {os.path.join(build, name) for name in names} | set(own.values())
    for path in sorted(paths):
        put(path, os.path.join(folder, "bin", os.path.relpath(path, build)))
    for library, path in sorted(taken.items()):
        put(path, os.path.join(folder, "lib", library))
    for source, target in TEXTS.items():
        put(os.path.join(ROOT, source), os.path.join(folder, target),
            strip=False)
    return taken


def binaries(folder):
    return [file for part in ("bin", "lib")
            for file in all_files(os.path.join(folder, part))]


def missing_from(folder):
    """Libraries that the loader would look for outside the folder, though they
    do not belong to the machine; sorted."""
    folder = os.path.realpath(folder)
    there = dict(os.environ, LD_LIBRARY_PATH=os.path.join(folder, "lib"))
    return sorted({
        library for file in binaries(folder)
        for library, path in needed_by(file, there)
        if not OF_MACHINE.fullmatch(library)
        and not (path and os.path.realpath(path).startswith(folder + os.sep))})


def architectures(library):
    """Those that each kernel of the library has machine code for: {"75", "80"}.
    nvcc leaves a block for each .cu, with an entry for each architecture."""
    with open(library, "rb") as file:
        data = file.read()
    common, block = None, -1
    while (block := data.find(b"\x50\xed\x55\xba", block + 1)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, block)
        at, found = block + header, set()
        while at < block + header + size:
            kind, _, header_bytes, size_bytes, _, _, _, _, arch = (
                struct.unpack_from("<HHIQIIHHI", data, at))
            if kind == MACHINE_CODE:
                found.add(str(arch))
            at += header_bytes + size_bytes
        common = found if common is None else common & found
        block = at - 1
    return common or set()


def options_of(build, name):
    """The value of one of Meson's options."""
    path = os.path.join(build, "meson-info", "intro-buildoptions.json")
    with open(path, encoding="utf-8") as file:
        return next(option["value"] for option in json.load(file)
                    if option["name"] == name)


def write(build, names, folder):
    """Writes the pack; returns the exit status."""
    build, folder = os.path.realpath(build), os.path.abspath(folder)
    if os.path.exists(folder) and (not os.path.isdir(folder)
                                   or os.listdir(folder)):
        say(f"shardbook: test gpu --pack {folder}: it exists and is not an "
            "empty folder")
        return 2
    if not any(name.endswith("libshardbook_nccl.so") for name in names):
        say("shardbook: test gpu --pack: this build has no NCCL: nccl.h or "
            "libnccl.so was not found when it was configured")
        return 2
    taken = fill(build, names, folder)
    if missing := missing_from(folder):
        say(f"shardbook: test gpu --pack {folder}: it lacks "
            + ", ".join(missing))
        return 1
    wanted = options_of(build, "gpu_architectures")
    found = architectures(os.path.join(folder, "bin", CUDA_LIBRARY))
    if found != set(wanted):
        say(f"shardbook: test gpu --pack {folder}: {CUDA_LIBRARY} has code for "
            f"{sorted(found)}, not for {wanted}")
        return 1
    glibc = newest_glibc(binaries(folder))
    with open(os.path.join(folder, "glibc"), "w", encoding="utf-8") as file:
        file.write(".".join(map(str, glibc)) + "\n")

    archive = compress(folder)
    size = os.path.getsize(archive)
    unpacked = sum(os.path.getsize(path) for path in all_files(folder))
    print(f"{folder}: {len(names)} programs and libraries, {len(taken)} shared "
          f"libraries, {unpacked / 2**20:.1f} MiB; needs glibc "
          f"{glibc[0]}.{glibc[1]}")
    print("Kernels for sm_" + ", sm_".join(wanted) + "; newer GPUs compile those "
          f"of sm_{wanted[-1]}")
    print(f"{archive}: {size / 2**20:.1f} MiB (at most "
          f"{LARGEST_BYTES >> 20})")
    print(f"There: {os.path.basename(folder)}/run test gpu")
    return 0 if size <= LARGEST_BYTES else 1
