"""A notebook in a browser: Jupyter's page, its buttons, and what it shows.

  browser_test.py BUILD
"""

import asyncio
import json
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

import skipping

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "02_ddp.ipynb"
LIMIT_S = 60

# Cells that follow the notebook's own.
LOOP = ["#include <iostream>",
        "namespace endless { void loop() { for (;;) {} } }",
        'std::cout << "looping" << std::endl; endless::loop();',
        'std::cout << "after" << std::endl;']

# The texts below the cells, in order; of cells that print nothing, "".
TEXTS = ("Jupyter.notebook.get_cells().filter(c => c.cell_type === 'code')"
         ".map(c => c.element.find('.output').text())")
BUSY = "Jupyter.notebook.kernel_busy"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_notebook(folder):
    """A copy of the book's notebook, without outputs and with LOOP."""
    notebook = json.loads((ROOT / "notebooks" / NAME).read_text("utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    for index, source in enumerate(LOOP):
        notebook["cells"].append({
            "cell_type": "code", "execution_count": None,
            "id": f"loop-{index}", "metadata": {}, "outputs": [],
            "source": source})
    (folder / NAME).write_text(json.dumps(notebook), "utf-8")


class Server:
    """Jupyter on loopback, whose folder looks like the book's."""

    def __init__(self, build):
        self.folder = tempfile.TemporaryDirectory(prefix="browser-test-")
        root = pathlib.Path(self.folder.name)
        (root / "notebooks").mkdir()
        for name in ("core", "comm", "sim", "chapters"):
            (root / name).symlink_to(ROOT / name)
        for path in (ROOT / "notebooks").iterdir():
            if path.suffix != ".ipynb":
                (root / "notebooks" / path.name).symlink_to(path)
        (root / "build").symlink_to(build)
        write_notebook(root / "notebooks")
        port, token = free_port(), secrets.token_hex(16)
        self.log = open(root / "log", "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "notebook", "--no-browser", "--allow-root",
             "--ip=127.0.0.1", f"--port={port}", "--port-retries=0",
             f"--NotebookApp.token={token}", f"--notebook-dir={root}"],
            stdin=subprocess.DEVNULL, stdout=self.log,
            stderr=subprocess.STDOUT, start_new_session=True)
        self.url = (f"http://127.0.0.1:{port}/notebooks/notebooks/{NAME}"
                    f"?token={token}")
        self.wait(f"http://127.0.0.1:{port}/api?token={token}")

    def wait(self, url):
        end = time.monotonic() + LIMIT_S
        while True:
            try:
                urllib.request.urlopen(url, timeout=LIMIT_S).close()
                return
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    self.log.seek(0)
                    raise RuntimeError(
                        "Jupyter did not start:\n" + self.log.read()) from None
            time.sleep(0.1)

    def close(self):
        """Twice SIGINT stops Jupyter and its kernels without a question."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()
        self.folder.cleanup()


class BrowserTest(unittest.TestCase):
    def test_a_notebook_in_its_page(self):
        server = Server(BUILD)
        self.addCleanup(server.close)
        asyncio.run(self.visit(server.url))

    async def visit(self, url):
        import devtools

        page = devtools.Page()
        try:
            await page.open(devtools.find_browser(), url)
            await page.until("Jupyter.notebook.kernel.is_connected()",
                             "the kernel")
            await self.run_all(page)
            await self.look_at_pictures(page)
            await self.interrupt(page)
            await self.restart(page)
            await self.follow_an_end(page)
        finally:
            page.close()

    async def run_all(self, page):
        await page.click("#run_all_cells a")
        await page.until(f"{TEXTS}.at(-2).includes('looping')",
                         "the cell that loops")
        errors = await page.value(
            "[...document.querySelectorAll('.output_error')]"
            ".map(e => e.innerText).join('\\n')")
        self.assertEqual(errors, "")

    async def look_at_pictures(self, page):
        """Each picture has a size, stays in its column, and draws something."""
        pictures = await page.value(
            "[...document.querySelectorAll('.output_html img')].map(image => {"
            " const box = image.getBoundingClientRect();"
            " const cell = image.closest('.output_area')"
            "  .getBoundingClientRect();"
            " return {width: box.width, height: box.height, alt: image.alt,"
            "  inside: box.right <= cell.right + 1,"
            "  drawn: image.complete && image.naturalWidth}})")
        self.assertGreaterEqual(len(pictures), 3)
        for picture in pictures:
            self.assertGreater(picture["width"], 200, picture)
            self.assertGreater(picture["height"], 50, picture)
            self.assertGreater(picture["drawn"], 200, picture)
            self.assertTrue(picture["inside"], picture)
            self.assertTrue(picture["alt"], picture)

    async def interrupt(self, page):
        self.assertTrue(await page.value(BUSY))
        await page.click("button[data-jupyter-action="
                         "'jupyter-notebook:interrupt-kernel']")
        # Behind an error, a kernel refuses what was sent before it is idle.
        await page.until(f"{TEXTS}.at(-2).includes('was interrupted')"
                         f" && !{BUSY}", "the interrupt")
        # What earlier cells made is still there.
        await self.run_cell(page, -1)
        await page.until(f"{TEXTS}.at(-1).includes('after')",
                         "the cell after the interrupt")

    async def restart(self, page):
        await page.click("#restart_clear_output a")
        await page.until("document.querySelector('.modal .btn-danger')",
                         "the question whether to restart")
        await page.click(".modal .btn-danger")
        await page.until(f"{TEXTS}.join('') === ''", "the outputs to go")
        await page.until("Jupyter.notebook.kernel.is_connected()",
                         "the restarted kernel")
        await page.until(f"!{BUSY}", "the restarted kernel to be idle")
        # The new kernel knows nothing, and learns it again.
        await self.run_cell(page, -1)
        await page.until(f"{TEXTS}.at(-1).includes('undeclared') && !{BUSY}",
                         "an error about std::cout")
        await self.run_cell(page, -4)
        await self.run_cell(page, -1)
        await page.until(f"{TEXTS}.at(-1).trim() === 'after'",
                         "the cell after the restart")

    async def follow_an_end(self, page):
        """A kernel that is killed: Jupyter says so, and starts another."""
        await page.value(
            "Jupyter.notebook.get_cells().at(-2).set_text('std::abort();'); "
            "Jupyter.notebook.get_cells().at(-3).set_text("
            "'#include <csignal>')")
        await self.run_cell(page, -3)
        await page.value("Jupyter.notebook.get_cells().at(-2)"
                         ".set_text('raise(SIGKILL);')")
        await self.run_cell(page, -2)
        await page.until("document.querySelector('.modal') && "
                         "document.querySelector('.modal').innerText"
                         ".includes('died')", "the message about the end")
        await page.click(".modal .btn-primary")
        await page.until("Jupyter.notebook.kernel.is_connected()",
                         "another kernel")
        await self.run_cell(page, -4)
        await self.run_cell(page, -1)
        await page.until(f"{TEXTS}.at(-1).trim() === 'after'",
                         "the cell after the end")

    async def run_cell(self, page, index):
        await page.value(
            f"Jupyter.notebook.execute_cells([{index} + "
            "Jupyter.notebook.ncells()])")


def check():
    import devtools
    import notebook

    if not devtools.find_browser():
        raise skipping.Missing("there is no Chromium")
    if not notebook.__version__.startswith("6."):
        raise skipping.Missing("the page of Notebook "
                               f"{notebook.__version__} has other buttons; "
                               "this test knows those of version 6")


if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv[1]).resolve()
    sys.exit(skipping.main(sys.argv.pop(1), check,
                           ["jupyter_client", "tornado", "notebook"]))
