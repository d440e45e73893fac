"""Finds a Python that can import torch, and continues in it.

Order: SHARDBOOK_PYTHON, the running interpreter, python3, /usr/bin/python3.
Imports nothing but the standard library.

    import torch_python

    torch_python.require_torch()  # or the script ends with status 77
    import torch
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys

_MARK = "SHARDBOOK_PYTHON_CHOSEN"


def _runs(python, line):
    try:
        probe = subprocess.run(
            [python, "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def candidates():
    """The interpreters to try, in order, each once."""
    asked = os.environ.get("SHARDBOOK_PYTHON")
    names = [asked, sys.executable, "python3", "/usr/bin/python3"]
    found = [shutil.which(name) for name in names if name]
    return list(dict.fromkeys(path for path in found if path))


def find():
    """The first interpreter that has torch, which is not imported, or None."""
    look = "import importlib.util as u; assert u.find_spec('torch')"
    return next((each for each in candidates() if _runs(each, look)), None)


def none_found():
    return (
        "no Python with torch; tried " + ", ".join(candidates()) + "; install "
        "python3-torch, or name another interpreter in SHARDBOOK_PYTHON"
    )


def ensure_torch():
    """Returns when torch can be imported, maybe in another interpreter.

    Returns a sentence instead when no candidate has torch.
    """
    if os.environ.pop(_MARK, None) or "torch" in sys.modules:
        return None
    for python in candidates():
        if _runs(python, "import torch"):
            if os.path.abspath(python) != os.path.abspath(sys.executable):
                os.environ[_MARK] = python
                sys.stdout.flush()
                os.execv(python, [python, *sys.argv])
            return None
    return none_found()


def die_with_parent():
    """Asks Linux to end this process when the one that started it ends."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def require_torch():
    """Ends a test as skipped where no Python has torch."""
    if reason := ensure_torch():
        print(f"SKIPPED: {reason}")
        sys.exit(77)
