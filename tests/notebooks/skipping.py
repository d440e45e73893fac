"""What the tests of notebooks need, and how they say that it is missing."""

import os
import pathlib
import tempfile
import unittest


class Missing(Exception):
    """Something that a test needs is not installed."""


def need_module(name):
    try:
        __import__(name)
    except ImportError:
        raise Missing(f"no Python here can import {name}") from None


def need_kernel(build):
    folder = build / "share" / "jupyter"
    if not (folder / "kernels" / "xcpp17" / "kernel.json").exists():
        raise Missing("this build has no kernel for notebooks")
    return folder


def main(build, check, modules):
    """Runs the tests of the main module with a home of their own.

    Returns 0, 1, or 77 where something is missing.
    """
    build = pathlib.Path(build).resolve()
    try:
        for name in modules:
            need_module(name)
        jupyter = need_kernel(build)
        check()
    except Missing as missing:
        print(f"SKIPPED: {missing}")
        return 77
    with tempfile.TemporaryDirectory(prefix="notebook-home-") as home:
        os.environ.update(HOME=home, JUPYTER_RUNTIME_DIR=home,
                          JUPYTER_PATH=str(jupyter))
        program = unittest.main(exit=False, verbosity=2)
    return 0 if program.result.wasSuccessful() else 1
