"""The kernel, as Jupyter sees it: requests over its sockets, and the answers.

  kernel_test.py BUILD
"""

import pathlib
import sys
import tempfile
import time
import unittest

import skipping

LIMIT_S = 60
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Kernel:
    """A running kernel in a folder of its own."""

    def __init__(self, folder):
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="xcpp17")
        self.manager.start_kernel(cwd=folder)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def run(self, code):
        """The reply to a cell, and the messages that came with it."""
        messages = []
        reply = self.client.execute_interactive(
            code, timeout=LIMIT_S, allow_stdin=False,
            output_hook=lambda m: messages.append((m["msg_type"],
                                                   m["content"])))
        return reply["content"], messages

    def text(self, code, stream="stdout"):
        """What a cell prints; it must succeed."""
        reply, messages = self.run(code)
        if reply["status"] != "ok":
            raise AssertionError(f"{reply['ename']}: {reply['evalue']}")
        return "".join(content["text"] for kind, content in messages
                       if kind == "stream" and content["name"] == stream)

    def error(self, code):
        """How a cell fails, as Jupyter shows it: name and text."""
        reply, messages = self.run(code)
        shown = [content for kind, content in messages if kind == "error"]
        if (reply["status"] != "error" or len(shown) != 1
                or any(reply[key] != value
                       for key, value in shown[0].items())):
            raise AssertionError(f"expected one error: {reply}, {messages}")
        return shown[0]["ename"], shown[0]["evalue"]

    def interrupted(self, code, busy_s=0):
        """How a cell fails that is interrupted once it has printed a line, by a
        front end that does something else before."""
        failed = []
        printed = False

        def interrupt_when_printed(message):
            nonlocal printed
            if message["msg_type"] == "stream" and not printed:
                printed = True
                time.sleep(busy_s)
                self.manager.interrupt_kernel()
            if message["msg_type"] == "error":
                failed.append(message["content"]["ename"])

        self.client.execute_interactive(code, timeout=LIMIT_S,
                                        allow_stdin=False,
                                        output_hook=interrupt_when_printed)
        return failed

    def restart(self, now=False):
        self.manager.restart_kernel(now=now)
        self.client.wait_for_ready(timeout=LIMIT_S)
        self.text("#include <iostream>")

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


class KernelTest(unittest.TestCase):
    """The cases share one kernel, which starts again when one has broken it."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kernel-test-")
        cls.kernel = None

    @classmethod
    def tearDownClass(cls):
        cls.end_kernel()
        cls.folder.cleanup()

    @classmethod
    def end_kernel(cls):
        if cls.kernel:
            cls.kernel.stop()
        cls.kernel = None

    def setUp(self):
        if KernelTest.kernel and not KernelTest.kernel.manager.is_alive():
            self.end_kernel()
        if not KernelTest.kernel:
            KernelTest.kernel = Kernel(self.folder.name)
            self.kernel.text("#include <iostream>\n#include <stdexcept>\n"
                             "#include <string>\n#include <vector>")

    def test_prints_on_both_streams(self):
        self.assertEqual(self.kernel.text('std::cout << "hello\\n";'),
                         "hello\n")
        self.assertEqual(self.kernel.text('std::cerr << "oh\\n";', "stderr"),
                         "oh\n")

    def test_characters_and_bytes_arrive(self):
        self.assertEqual(self.kernel.text(
            'std::cout << std::string(70000, \'x\') << "é☃\\n";'),
            "x" * 70000 + "é☃\n")
        self.assertEqual(self.kernel.text('std::cout << "\\xff!\\n";'),
                         "\ufffd!\n")

    def test_output_arrives_while_the_cell_runs(self):
        self.kernel.text("#include <unistd.h>")
        self.kernel.text("namespace slow { void wait(const char* file) { "
                         "while (access(file, F_OK) != 0) usleep(1000); } }")
        file = pathlib.Path(self.folder.name) / "seen"
        seen = []

        def hook(message):
            if message["msg_type"] == "stream":
                seen.append(message["content"]["text"])
                file.touch()  # the cell waits for this

        self.kernel.client.execute_interactive(
            f'std::cout << "first\\n"; slow::wait("{file}"); '
            'std::cout << "second\\n";', timeout=LIMIT_S, output_hook=hook)
        self.assertEqual(seen, ["first\n", "second\n"])

    def test_threads_do_not_print(self):
        self.kernel.text("#include <cstdio>\n#include <thread>\n"
                         "#include <xcpp/xdisplay.hpp>")
        self.kernel.text(
            "namespace ranks { void stream() { std::cout << 2 << \" of 4\" "
            "<< std::endl << \"more\"; } "
            "void log() { std::cerr << \"oh\\n\"; std::clog << 1; } "
            "void print() { std::printf(\"%d\\n\", 3); std::puts(\"x\"); } "
            "struct Dot {}; nl::json mime_bundle_repr(const Dot&) { "
            "return {{\"text/plain\", \".\"}}; } "
            "void show() { xcpp::display(Dot{}); } "
            "template <typename F> void run(F f) { std::thread(f).join(); } "
            "void fail() { run(stream); throw std::out_of_range(\"far\"); } }")
        for name, what in (("stream", "2 of 4"), ("log", "oh"),
                           ("print", "3"), ("show", "a display")):
            with self.subTest(name):
                reply, messages = self.kernel.run(
                    f'std::cout << "begin\\n"; ranks::run(ranks::{name}); '
                    'std::printf("%s\\n", "end");')
                self.assertEqual(reply["ename"], "PrintError")
                self.assertIn(f'such as a rank, printed "{what}", which',
                              reply["evalue"])
                # The cell itself prints as ever, all of it.
                self.assertEqual(
                    "".join(content["text"] for kind, content in messages
                            if kind == "stream"), "begin\nend\n")
                self.assertNotIn("display_data", [kind for kind, _ in messages])
                self.assertEqual(self.kernel.text("std::cout << 1;"), "1")
        name, text = self.kernel.error("ranks::fail();")
        self.assertEqual(name, "std::out_of_range")
        self.assertRegex(text, '^far\n.* printed "2 of 4"')

    def test_ranks_neither_print_nor_loop_for_ever(self):
        self.kernel.text(f'#pragma cling add_include_path("{ROOT}")\n'
                         f'#pragma cling load("{BUILD}/notebooks/libshardbook")'
                         '\n#include "notebooks/live_ranks.h"')
        self.kernel.text("using namespace shardbook;")
        self.kernel.text(
            "namespace live { int say(ProcessGroup& world) { "
            "if (world.rank() == 1) std::cout << \"rank 1 of \" "
            "<< world.size() << std::endl; return world.rank(); } "
            "int loop(ProcessGroup& world) { if (world.rank() == 1) for (;;) {}"
            " Tensor x = Tensor::full({1}, 1); world.all_reduce(x).wait(); "
            "return 1; } }")
        name, text = self.kernel.error(
            "auto said = notebook::on_ranks(3, live::say);")
        self.assertEqual(name, "PrintError")
        self.assertIn('printed "rank 1 of 3", which', text)
        self.assertEqual(self.kernel.text("std::cout << said[2];"), "2")
        self.assertEqual(self.kernel.interrupted(
            'std::cout << "begin\\n"; notebook::on_ranks(3, live::loop);'),
            ["Interrupted"])
        self.assertEqual(self.kernel.text("std::cout << 1;"), "1")

    def test_variables_stay(self):
        self.kernel.text("std::vector<int> kept{1, 2};")
        self.kernel.text("kept.push_back(39);")
        self.assertEqual(self.kernel.text("std::cout << kept[2] + 3;"), "42")

    def test_displays_come_in_order(self):
        self.kernel.text("#include <xcpp/xdisplay.hpp>")
        self.kernel.text(
            "namespace pic { struct Dot { int x; }; nl::json "
            "mime_bundle_repr(const Dot& dot) { return {{\"text/plain\", "
            "std::to_string(dot.x)}, {\"image/svg+xml\", \"<svg/>\"}}; } }")
        _, messages = self.kernel.run(
            'std::cout << "a"; xcpp::display(pic::Dot{1}); std::cout << "b"; '
            'xcpp::display(pic::Dot{2}, "id"); '
            'xcpp::display(pic::Dot{3}, "id", true); xcpp::clear_output();')
        kinds = [kind for kind, _ in messages
                 if kind not in ("status", "execute_input")]
        self.assertEqual(kinds, ["stream", "display_data", "stream",
                                 "display_data", "update_display_data",
                                 "clear_output"])
        shown = [content for kind, content in messages if "display" in kind]
        self.assertEqual(shown[0]["data"],
                         {"text/plain": "1", "image/svg+xml": "<svg/>"})
        self.assertEqual([c["transient"].get("display_id") for c in shown],
                         [None, "id", "id"])

    def test_exceptions_name_their_type(self):
        self.kernel.text("namespace bad { void fail() { "
                         "throw std::out_of_range(\"too far\"); } }")
        self.assertEqual(self.kernel.error("bad::fail();"),
                         ("std::out_of_range", "too far"))
        self.assertEqual(self.kernel.text("std::cout << 1;"), "1")

    def test_mistakes_name_their_line_and_leave_nothing(self):
        name, text = self.kernel.error("int good = 1;\nint wrong = nothing;")
        self.assertEqual(name, "CompileError")
        self.assertRegex(text, r"^cell \d+:2:13: error: use of undeclared "
                               "identifier 'nothing'")
        self.assertEqual(self.kernel.text("int good = 2; std::cout << good;"),
                         "2")

    def test_headers_that_fail_are_read_again(self):
        folder = pathlib.Path(self.folder.name)
        (folder / "one.h").write_text("#pragma once\nint one() { return 1; }")
        code = f'#include "{folder}/one.h"\n#include "{folder}/two.h"'
        self.assertIn("file not found", self.kernel.error(code)[1])
        (folder / "two.h").write_text("#pragma once\nint two() { return 2; }")
        self.kernel.text(code)
        self.assertEqual(self.kernel.text("std::cout << one() + two();"), "3")

    def test_a_compiler_that_loops_is_ended(self):
        # clang 19 never comes back from this cell.
        name, text = self.kernel.error(
            "namespace loops { void f() { int q = } }")
        self.assertEqual(name, "CompileError")
        self.assertIn("expected expression", text)
        self.assertEqual(self.kernel.text("std::cout << 1;"), "1")

    def test_symbols_that_no_library_has(self):
        self.kernel.text("namespace gone { void away(int); }")
        name, text = self.kernel.error("gone::away(1);")
        self.assertEqual(name, "LinkError")
        self.assertIn("gone::away(int)", text)
        self.assertEqual(self.kernel.text("std::cout << 1;"), "1")

    def test_libraries_that_are_missing(self):
        name, text = self.kernel.error('#pragma cling load("libnothing")')
        self.assertEqual(name, "LoadError")
        self.assertIn('load("libnothing"): there is no such library', text)
        (pathlib.Path(self.folder.name) / "libbad.so").write_text("no ELF")
        name, text = self.kernel.error('#pragma cling load("libbad")')
        self.assertEqual(name, "LoadError")
        self.assertIn("libbad.so", text)
        name, text = self.kernel.error(
            '#pragma cling add_include_path("no/such")')
        self.assertIn("no such folder", text)
        self.assertEqual(self.kernel.text("std::cout << 1;"), "1")

    def test_cells_outside_the_grammar_are_refused(self):
        name, text = self.kernel.error("int f() { return 1; }")
        self.assertEqual(name, "GrammarError")
        self.assertRegex(text, r"cell \d+, line 1: functions are defined in "
                               "a namespace block")

    def test_cells_that_loop_are_interrupted(self):
        self.kernel.text("#include <chrono>\n#include <thread>")
        self.kernel.text(
            "namespace loops { void empty() { for (;;) {} } "
            "void fill() { std::vector<int> v; for (;;) { v.push_back(1); "
            "v.clear(); } } "
            "void nap() { std::this_thread::sleep_for("
            "std::chrono::hours(1)); } "
            "void call() { try { fill(); } catch (const std::exception&) {} } "
            "void print() { for (;;) std::cout << \"x\\n\"; } }")
        self.kernel.text("int survivor = 41;")
        for name in ("empty", "fill", "nap", "call", "print"):
            with self.subTest(name):
                self.assertEqual(self.kernel.interrupted(
                    f'std::cout << "begin\\n"; loops::{name}();'),
                    ["Interrupted"])
                self.assertEqual(
                    self.kernel.text("std::cout << survivor + 1;"), "42")

    def test_a_front_end_that_is_busy_misses_no_end_of_a_cell(self):
        self.kernel.text("#include <xcpp/xdisplay.hpp>")
        self.kernel.text(
            "namespace flood { struct Dot {}; nl::json "
            "mime_bundle_repr(const Dot&) { return {{\"text/plain\", "
            "\".\"}}; } "
            "void print() { for (;;) std::cout << \"x\\n\"; } "
            "void show() { Dot dot; for (;;) xcpp::display(dot); } }")
        for name in ("print", "show"):
            with self.subTest(name):
                # As many messages as a socket keeps would come meanwhile
                self.assertEqual(self.kernel.interrupted(
                    f'std::cout << "begin\\n"; flood::{name}();', busy_s=2),
                    ["Interrupted"])
                self.assertEqual(self.kernel.text("std::cout << 1;"), "1")

    def test_an_interrupt_between_cells_is_none(self):
        self.kernel.manager.interrupt_kernel()
        self.assertEqual(self.kernel.text("std::cout << 1;"), "1")

    def test_completion_and_description(self):
        self.kernel.text("namespace words { /// Adds one.\n"
                         "int increment(int k) { return k + 1; } "
                         "struct Thing { int width = 1; }; }")
        self.kernel.text("words::Thing thing_é;")
        client = self.kernel.client

        def complete(code):
            content = client.complete(code, len(code), reply=True,
                                      timeout=LIMIT_S)["content"]
            return content["matches"], content["cursor_start"]

        self.assertEqual(complete("words::incr"), (["increment"], 7))
        self.assertEqual(complete("int é = words::Th"), (["Thing"], 15))
        self.assertEqual(complete("nothing::at"), ([], 9))
        found = client.inspect("words::increment(1)", 9, reply=True,
                               timeout=LIMIT_S)["content"]
        self.assertEqual(found["data"]["text/plain"],
                         "int increment(int k)\n\nAdds one.")

    def test_unfinished_cells_are_told_from_finished_ones(self):
        def status(code):
            asked = self.kernel.client.is_complete(code)
            while True:
                reply = self.kernel.client.get_shell_msg(timeout=LIMIT_S)
                if reply["parent_header"].get("msg_id") == asked:
                    return reply["content"]["status"]

        self.assertEqual(status("int a = 1;"), "complete")
        self.assertEqual(status("namespace a {"), "incomplete")
        self.assertEqual(status("for (;;) {}"), "invalid")

    def test_a_cell_that_crashes_asks_for_a_restart(self):
        self.kernel.text("namespace crash { void now() { "
                         "volatile int* p = nullptr; *p = 1; } "
                         "int deep(int n) { volatile int a[999]; a[n % 9] = n; "
                         "return deep(n + 1) + a[0]; } }")
        for call in ("crash::now();", "crash::deep(0);"):
            name, text = self.kernel.error(call)
            self.assertEqual(name, "Crash")
            self.assertIn("Segmentation fault", text)
            self.assertIn("restart the kernel", text)
            self.assertIn("restart", self.kernel.error("int x = 1;")[1])
            self.kernel.restart()
            self.assertEqual(self.kernel.text("std::cout << 2;"), "2")
            self.kernel.text("namespace crash { int deep(int n) { volatile "
                             "int a[999]; a[n % 9] = n; "
                             "return deep(n + 1) + a[0]; } }")
        self.end_kernel()

    def test_a_restart_forgets_everything(self):
        self.kernel.text("int forgotten = 1;")
        self.kernel.restart()
        self.assertEqual(
            self.kernel.text("int forgotten = 2; std::cout << forgotten;"),
            "2")
        self.end_kernel()

    def test_a_kernel_that_is_killed_can_be_started_again(self):
        self.kernel.text("#include <csignal>")
        self.kernel.client.execute("raise(SIGKILL);")
        end = time.monotonic() + LIMIT_S
        while self.kernel.manager.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        self.assertFalse(self.kernel.manager.is_alive())
        # Now, as Jupyter itself does: a request to shut down, which the dead
        # kernel would never read, would reach the new one.
        self.kernel.restart(now=True)
        self.assertEqual(self.kernel.text("std::cout << 1;"), "1")
        self.end_kernel()


if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
    sys.exit(skipping.main(BUILD, lambda: None, ["jupyter_client"]))
