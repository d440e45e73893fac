"""Runs a program that nobody has read, within limits.

  limits.py LOG COMMAND...          a compiler: limits of memory and sizes
  limits.py --alone LOG COMMAND...  a program: it also may use little time,
                                    and the kernel ends it (SIGSYS) where it asks
                                    for another process, a signal to one, a
                                    connection, or a change of any file

The program prints into LOG. The calls are refused by a filter (seccomp), which
needs no rights and which a program cannot take off. The filter names what it
refuses, and every call that is newer than itself.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys

RUN_BYTES, COMPILE_BYTES = 2 << 30, 4 << 30
OUTPUT_BYTES, OBJECT_BYTES = 1 << 20, 256 << 20
RUN_SECONDS, WAIT_SECONDS, COMPILE_SECONDS = 5, 15, 60
OPEN_FILES = 64
# The caller's other variables may be secrets
KEPT = ["PATH", "LD_LIBRARY_PATH", "OMP_WAIT_POLICY", "SHARDBOOK_JUDGE"]

# By machine: the number of its kind in <linux/audit.h>, and of calls
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
NONE = -1  # this machine has no such call
REFUSED = {
    # Processes
    "fork": (57, NONE), "vfork": (58, NONE), "ptrace": (101, 117),
    "process_vm_writev": (311, 271), "setpgid": (109, 154),
    "setsid": (112, 157),
    # Signals
    "kill": (62, 129), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    # What stays when the program has ended
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180),
    # Connections, and calls that the kernel makes for a program
    "socket": (41, 198), "io_uring_setup": (425, 425),
    # Files
    "creat": (85, NONE), "truncate": (76, 45), "rename": (82, NONE),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, NONE),
    "mkdirat": (258, 34), "rmdir": (84, NONE), "link": (86, NONE),
    "linkat": (265, 37), "unlink": (87, NONE), "unlinkat": (263, 35),
    "symlink": (88, NONE), "symlinkat": (266, 36), "mknod": (133, NONE),
    "mknodat": (259, 33), "chmod": (90, NONE), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, NONE),
    "fchown": (93, 55), "lchown": (94, NONE), "fchownat": (260, 54),
    "utime": (132, NONE), "utimes": (235, NONE), "futimesat": (261, NONE),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "open_by_handle_at": (304, 265),
    "mount": (165, 40), "umount2": (166, 39)}
# Answered as by a kernel that has no such call, so that libraries use another
ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}
NEWEST = 462
# Allowed where an argument says so: of a thread, to read, to oneself
CLONE, OPEN, OPENAT = (56, 220), (2, NONE), (257, 56)
TGKILL, PRLIMIT, IOCTL = (234, 131), (302, 261), (16, 29)
CLONE_THREAD, TYPE_INTO_TERMINAL = 0x10000, 0x5412
TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

KILL, ALLOW, NO_SUCH_CALL = 0x80000000, 0x7FFF0000, 0x00050000 | 38  # ENOSYS
LOAD, RETURN, EQUAL, GREATER, HAS_BIT = 0x20, 0x06, 0x15, 0x25, 0x45
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2

_libc = ctypes.CDLL(None, use_errno=True)


def filter_of(machine, own_pid):
    """The filter's instructions, as <linux/filter.h> has them."""
    audit, column = MACHINES[machine]
    code = []

    def add(operation, value, skip_if=0, skip_else=0):
        code.append(struct.pack("HBBI", operation, skip_if, skip_else, value))

    def answer(number, result):
        """Returns `result` for a call."""
        if number != NONE:
            add(EQUAL, number, 0, 1)
            add(RETURN, result)

    def judge(number, argument, test, value, if_so, if_not):
        """Asks for the lower half of an argument."""
        if number != NONE:
            add(EQUAL, number, 0, 4)
            add(LOAD, 16 + 8 * argument)
            add(test, value, 0, 1)
            add(RETURN, if_so)
            add(RETURN, if_not)

    add(LOAD, 4)  # the machine
    add(EQUAL, audit, 1, 0)
    add(RETURN, KILL)
    add(LOAD, 0)  # the call's number
    for numbers in REFUSED.values():
        answer(numbers[column], KILL)
    for numbers in ABSENT.values():
        answer(numbers[column], NO_SUCH_CALL)
    add(GREATER, NEWEST, 0, 1)
    add(RETURN, NO_SUCH_CALL)
    judge(CLONE[column], 0, HAS_BIT, CLONE_THREAD, ALLOW, KILL)
    judge(OPEN[column], 1, HAS_BIT, TO_WRITE, KILL, ALLOW)
    judge(OPENAT[column], 2, HAS_BIT, TO_WRITE, KILL, ALLOW)
    judge(TGKILL[column], 0, EQUAL, own_pid, ALLOW, KILL)
    judge(PRLIMIT[column], 0, EQUAL, 0, ALLOW, KILL)
    judge(IOCTL[column], 1, EQUAL, TYPE_INTO_TERMINAL, KILL, ALLOW)
    add(RETURN, ALLOW)
    return b"".join(code)


def can_filter():
    """Whether this kernel has filters for this machine."""
    return (platform.machine() in MACHINES and
            _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0) < 0 and
            ctypes.get_errno() == 14)  # EFAULT: it looked for the filter


def missing():
    """What no limit of this kernel forbids."""
    return [] if can_filter() else ["processes", "connections", "files"]


def forbid():
    """Sets the filter. It lasts beyond exec."""
    code = filter_of(platform.machine(), os.getpid())
    text = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(text))
    if (_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or
            _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)):
        sys.exit("limits: " + os.strerror(ctypes.get_errno()))


def limit(kind, value, more=0):
    """More than this is an error or a signal; at `more` beyond, the end."""
    hard = resource.getrlimit(kind)[1]
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (most, hard if most == hard else most + more))


def command(log, words, is_alone=False):
    """What starts a program within its limits."""
    return ["timeout", "--kill-after=1",
            str(WAIT_SECONDS if is_alone else COMPILE_SECONDS),
            sys.executable, "-S", "-B", os.path.abspath(__file__),
            *["--alone"] * is_alone, log, *words]


def reason(status):
    """Why a program that ran alone was ended, or "" if its limits did not."""
    too_long = (f"stopped after {RUN_SECONDS} s of computing, or {WAIT_SECONDS} s "
                "in all: a loop that never ends, or a rank that the others wait "
                "for")
    return {
        124: too_long, 137: too_long, 152: too_long,
        153: f"stopped: it printed more than {OUTPUT_BYTES >> 20} MiB",
        159: "stopped: it tried to start a process, to open a connection, or "
             "to write or change a file; print with std::printf",
    }.get(status, "")


def main(*words):
    is_alone = words[0] == "--alone"
    log, *program = words[is_alone:]
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), 1)
    os.dup2(1, 2)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ignored by Python
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_AS, RUN_BYTES if is_alone else COMPILE_BYTES)
    limit(resource.RLIMIT_FSIZE, OUTPUT_BYTES if is_alone else OBJECT_BYTES)
    environment = dict(os.environ)
    if is_alone:
        environment = {name: os.environ[name] for name in KEPT
                       if name in os.environ}
        # Threads reserve address space, which counts, for arenas of their own
        environment["MALLOC_ARENA_MAX"] = "2"
        # UCX, which Gloo brings along through MPI, starts a thread as it is
        # loaded, names it by a file, and tries shared memory
        environment.update(UCX_VFS_ENABLE="n", UCX_MEM_EVENTS="n")
        os.closerange(3, 1024)
        limit(resource.RLIMIT_NOFILE, OPEN_FILES)
        limit(resource.RLIMIT_CPU, RUN_SECONDS, more=1)
        if can_filter():
            forbid()
    os.execvpe(program[0], program, environment)


if __name__ == "__main__":
    main(*sys.argv[1:])
