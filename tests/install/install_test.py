#!/usr/bin/env python3
"""An outside project builds against what is installed, and as the parent of a
subproject.

    tests/install/install_test.py build            the test
    tests/install/install_test.py build --long     also builds the subproject
    tests/install/install_test.py build --update   writes the page's outputs again

The page chapters/your_own says how to do it. Its commands run here, in their
order, in a folder that has the project's two files.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "docs"))

from readme_tables import difference  # noqa: E402

LONG, UPDATE = "--long" in sys.argv, "--update" in sys.argv
HAS_GLOO = "--without-gloo" not in sys.argv
BUILD = pathlib.Path(sys.argv[1]).resolve()
PROJECT = ROOT / "chapters" / "your_own"
PAGE = PROJECT / "README.md"
FENCE = re.compile(r"^```console\n\$ (?P<command>.*)\n(?P<output>[^`]*)^```$",
                   re.MULTILINE)
# Wall time, and memory that depends on the processor
OF_THIS_MACHINE = ("time ", "  peak")


def comparable(output):
    return "".join(line for line in output.splitlines(keepends=True)
                   if not line.startswith(OF_THIS_MACHINE))


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = pathlib.Path(scratch.name)
        cls.prefix = cls.scratch / "prefix"
        cls.run_in(cls.scratch, f"meson install -C '{BUILD}' --no-rebuild "
                   f"--destdir '{cls.prefix}'")
        cls.pkg_config = next(cls.prefix.rglob("shardbook.pc")).parent
        cls.bin = next(cls.prefix.rglob("shardbook_table")).parent

    @classmethod
    def run_in(cls, folder, command, **variables):
        """What a command prints, which ends with status 0."""
        # Meson points this at the libraries of the build folder
        os.environ.pop("LD_LIBRARY_PATH", None)
        ended = subprocess.run(
            ["bash", "-c", command], cwd=folder, text=True, encoding="utf-8",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False,
            env={**os.environ, "LC_ALL": "C.UTF-8", **variables})
        if ended.returncode:
            raise AssertionError(f"{command}: status {ended.returncode}\n"
                                 + ended.stdout)
        return ended.stdout

    def run_with_prefix(self, folder, command):
        return self.run_in(folder, command,
                           PKG_CONFIG_PATH=str(self.pkg_config),
                           PATH=f"{self.bin}:{os.environ['PATH']}")

    def project(self, name):
        """A folder with the project's two files."""
        folder = self.scratch / name
        folder.mkdir()
        for file in ("local_sgd.cpp", "meson.build"):
            shutil.copy(PROJECT / file, folder)
        return folder

    def test_nothing_leads_back_to_the_build_folder(self):
        files = [*self.pkg_config.parent.glob("*.so"), *self.bin.iterdir()]
        self.assertGreater(len(files), 20)
        for file in files:
            headers = self.run_in(self.scratch, f"readelf -d '{file}'")
            self.assertIn("[$ORIGIN", headers)
            self.assertNotIn(str(BUILD), headers)
            found = self.run_in(self.scratch, f"ldd '{file}'")
            for line in found.splitlines():
                if "libshardbook" in line:
                    self.assertIn(str(self.prefix), line)
        self.assertIn("prefix=${pcfiledir}",
                      (self.pkg_config / "shardbook.pc").read_text("utf-8"),
                      "meson configure build -Dpkgconfig.relocatable=true")

    def test_all_headers_are_complete(self):
        include = next(self.prefix.rglob("include/shardbook"))
        (self.scratch / "all.cpp").write_text("".join(
            f'#include "{header.relative_to(include)}"\n'
            for header in sorted(include.rglob("*.h"))), encoding="utf-8")
        self.run_with_prefix(
            self.scratch, "g++ -std=c++17 -Wall -Werror -fsyntax-only all.cpp "
            "$(pkg-config --cflags shardbook)")

    def test_the_commands_of_the_page(self):
        folder = self.project("typed")
        new = text = PAGE.read_text("utf-8")
        commands = list(FENCE.finditer(text))
        self.assertTrue(commands)
        for fence in commands:
            command, shown = fence["command"], fence["output"]
            if "gloo" in command and not HAS_GLOO:
                continue
            printed = self.run_with_prefix(folder, command)
            new = new.replace(f"{command}\n{shown}", f"{command}\n{printed}")
            if not UPDATE:
                self.assertEqual(
                    difference(comparable(shown), comparable(printed)), "",
                    command)
        if UPDATE:
            PAGE.write_text(new, "utf-8")
        self.assertIn("<html", (folder / "report.html").read_text("utf-8"))

    def test_the_page_shows_the_build_file(self):
        self.assertIn((PROJECT / "meson.build").read_text("utf-8"),
                      PAGE.read_text("utf-8"))

    def test_meson_finds_what_is_installed(self):
        folder = self.project("found")
        self.run_with_prefix(folder, "meson setup build && ninja -C build")
        self.assertIn("--average-every",
                      self.run_in(folder, "build/local_sgd --help"))

    def test_as_a_subproject(self):
        folder = self.project("parent")
        (folder / "subprojects").mkdir()
        (folder / "subprojects" / "shardbook").symlink_to(ROOT)
        self.run_in(folder, "meson setup build --wrap-mode=forcefallback "
                    "-Dshardbook:cuda=disabled")
        targets = json.loads(self.run_in(
            folder, "meson introspect build --targets"))
        for target in targets:
            self.assertNotRegex(target["defined_in"],
                                "/(tests|bench|notebooks)/")
        # No other program is built or installed
        self.assertEqual({"local_sgd"}, {
            target["name"] for target in targets
            if target["type"] == "executable" and
            (target["build_by_default"] or target["installed"])})
        self.run_in(folder, "ninja -C build local_sgd.p/local_sgd.cpp.o")
        if LONG:
            self.run_in(folder, "ninja -C build")
            self.run_in(folder, "build/local_sgd --world-size 2 --steps 3")
            self.run_in(folder, "meson install -C build --no-rebuild "
                        f"--destdir '{folder}/prefix'")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
