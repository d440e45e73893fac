"""A pack of a few programs is complete: pack_test.py BUILD.

What ./shardbook test gpu --pack checks of the whole pack is checked here of one
that is made in a second, and is shown to notice what is missing.
"""

import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE]

import pack  # noqa: E402
import run_gpu  # noqa: E402

BUILD = os.path.realpath(sys.argv.pop(1))
PROGRAMS = ["bench/gpu/gpus", "chapters/00_single_device/ch00_single_device"]


class Pack(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = os.path.join(cls.scratch.name, "pack")
        libraries = [name for name in run_gpu.libraries(run_gpu.known_targets(
            BUILD)) if os.path.exists(os.path.join(BUILD, name))]
        cls.taken = pack.fill(BUILD, PROGRAMS + libraries, cls.folder)
        with open(os.path.join(cls.folder, "glibc"), "w",
                  encoding="utf-8") as file:
            file.write("2.0\n")

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    def run_in_pack(self, *words):
        return subprocess.run([os.path.join(self.folder, "run"), *words],
                              capture_output=True, text=True, check=False)

    def test_holds_all_libraries(self):
        self.assertEqual(pack.missing_from(self.folder), [])
        self.assertIn("libdnnl", " ".join(self.taken))

    def test_kernels_are_for_all_architectures(self):
        library = os.path.join(self.folder, "bin", pack.CUDA_LIBRARY)
        if not os.path.exists(library):
            self.skipTest("this build has no kernels for GPUs")
        self.assertEqual(pack.architectures(library),
                         set(pack.options_of(BUILD, "gpu_architectures")))

    def test_a_missing_library_is_named(self):
        for library in self.taken:
            path = os.path.join(self.folder, "lib", library)
            os.rename(path, path + ".away")
            try:
                self.assertIn(library, pack.missing_from(self.folder))
            finally:
                os.rename(path + ".away", path)

    def test_its_chapters_run(self):
        ran = self.run_in_pack("00_single_device", "--steps", "1",
                               "--model", "mlp", "--data", "random")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual(self.run_in_pack("99_none").returncode, 2)

    def test_the_suite_is_built(self):
        known = run_gpu.known_targets(BUILD)
        for name in run_gpu.suite() + [run_gpu.BENCHMARK, *PROGRAMS]:
            self.assertIn(name, known)


if __name__ == "__main__":
    unittest.main()
