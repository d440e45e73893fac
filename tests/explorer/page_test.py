"""The explorer in a browser: it shows what the command line answers.

  page_test.py BUILD
"""

import asyncio
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "notebooks"))
BUILD = pathlib.Path(sys.argv.pop()).resolve()
JOBS = [
    {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": "1",
     "batch": "64", "seq": "8192", "dtype": "bf16"},
    {"model": "gpt-13b", "cluster": "selene", "nodes": "4", "batch": "128",
     "seq": "2048", "dtype": "bf16", "tp": "8"},
    {"model": "gpt2-xl", "cluster": "kaggle-t4x2", "nodes": "1", "batch": "16",
     "seq": "1024", "dtype": "f16", "device-memory": "1GB"},
    {"model": "gpt-13b", "cluster": "dgx-a100", "nodes": "1", "batch": "64",
     "seq": "2048", "dtype": "bf16", "tp": "3"},
    {"model": "gpt-13b", "cluster": "dgx-a100", "nodes": "1000000000",
     "batch": "64", "seq": "2048", "dtype": "bf16"},
]
IS_READY = ("document.getElementById('answer').getAttribute('aria-busy') "
            "=== 'false'")


def answer_of_program(job, folder=None):
    words = [f"--{name}={value}" for name, value in job.items()]
    return subprocess.run(
        [BUILD / "chapters/planner/shardbook_plan", *words, "--format=json",
         "--explain", "--top=8"], check=False, capture_output=True, text=True,
        cwd=folder)


class Page(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        import devtools
        self.page = devtools.Page()
        self.addCleanup(self.page.close)
        await self.page.open(devtools.find_browser(), "about:blank")

    async def show(self, job):
        """The page of a job, and its text."""
        await self.page.call("Page.navigate", url="about:blank")
        url = (BUILD / "explorer/index.html").as_uri()
        await self.page.call("Page.navigate",
                             url=f"{url}#{urllib.parse.urlencode(job)}")
        await self.page.until(IS_READY, "an answer")
        return await self.page.value("document.body.innerText")

    async def test_the_page_shows_what_the_program_answers(self):
        for job in JOBS:
            program = answer_of_program(job)
            text = await self.show(job)
            if program.returncode == 2:
                error = program.stderr.removeprefix("error: ").strip()
                self.assertIn(error, text)
                continue
            answer = json.loads(program.stdout)
            self.assertIn(f"{answer['plans']:,} plans are legal", text)
            if not answer["best"]:
                self.assertIn("No plan fits", text)
                continue
            best = answer["best"][0]
            for part in (best["layout"], best["command"],
                         *(part["formula"] for kind in ("memory", "time")
                           for part in answer["explain"][kind])):
                self.assertIn(part, text)

    async def test_a_changed_field_asks_again_and_is_in_the_address(self):
        await self.show(JOBS[0])
        await self.page.value("""(() => {
          const nodes = document.forms.job.elements.nodes;
          nodes.value = "2";
          nodes.dispatchEvent(new Event("input", { bubbles: true }));
        })()""")
        expected = json.loads(
            answer_of_program({**JOBS[0], "nodes": "2"}).stdout)
        await self.page.until(
            "location.hash.includes('nodes=2') && "
            f"document.body.innerText.includes("
            f"{json.dumps(expected['best'][0]['command'])})", "two nodes")

    async def test_a_config_is_read(self):
        await self.show(JOBS[0])
        config = (ROOT / "tests/golden/llama_gqa/config.json").read_text("utf-8")
        await self.page.value("""((text) => {
          const dropped = new DataTransfer();
          dropped.items.add(new File([text], "config.json"));
          const field = document.forms.job.elements.file;
          field.files = dropped.files;
          field.dispatchEvent(new Event("input", { bubbles: true }));
        })(%s)""" % json.dumps(config))
        # The command line's sentence about this file
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "config.json").write_text(config, "utf-8")
            error = answer_of_program({**JOBS[0], "model": "config.json"},
                                      folder).stderr
        self.assertIn("config.json", error)
        await self.page.until(
            "document.body.innerText.includes("
            f"{json.dumps(error.removeprefix('error: ').strip())})", "config.json")

    async def test_nothing_leaves_the_page(self):
        await self.show(JOBS[0])
        asked = await self.page.value(
            "performance.getEntriesByType('resource').map((e) => e.name)"
            ".filter((name) => !/^(blob|data):/.test(name))")
        self.assertEqual(asked, [])


if __name__ == "__main__":
    try:
        import devtools
    except ImportError as missing:  # python3-tornado, which notebooks need
        print(f"skipped: {missing}")
        sys.exit(77)
    if not devtools.find_browser():
        print("skipped: no Chromium here")
        sys.exit(77)
    unittest.main()
