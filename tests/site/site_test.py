"""The site: what its pages name is there, and a browser shows them without errors.

  site_test.py PYTHON    one that can import Sphinx and MyST
"""

import base64
import html
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import urllib.parse
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "notebooks"))
PYTHON = sys.argv.pop()
# What build_site.py reads beside the pages
PARTS = ["chapters/site", "chapters/table", "chapters/explorer", "sim/clusters",
         "meson.build"]
HEADER = """#pragma once
namespace shardbook {
/// One thing of its kind.
struct OneThing {};
/// Makes a thing.
OneThing make_thing(int parts);
}
"""
NOTEBOOK = {"cells": [
    {"cell_type": "markdown",
     "source": ["# Steps\n", "\n", "See [it](#it).\n", "\n", "## It\n"]},
    {"cell_type": "code", "source": ["make_thing(2);"], "outputs": [
        {"data": {"text/html": ["<p>7\n\n", "# high</p>"],
                  "text/plain": ["seven"]}},
        {"data": {"text/html": ['<img src="%s" alt="A bar">']}},
        {"name": "stdout", "text": ["eight\n"]}]}]}
PICTURE = ('<svg viewBox="0 0 9 9" aria-label="A\n>\nbar" fill="#1c1e21">\n'
           '<rect fill="#ffffff"/>\n'
           '<rect fill="#9a7108" stroke="%s"/>\n</svg>\n')


def build(root, output, *options):
    return subprocess.run(
        [PYTHON, "-B", root / "chapters/site/build_site.py", root / "build",
         *options, "--output", output], check=False,
        capture_output=True, text=True)


class SmallSite(unittest.TestCase):
    """A book of a page or two, each with something of its own."""

    options = ["--no-api"]
    stroke = "#1c1e21"  # of a bar in a notebook's picture

    def site(self, **pages):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = self.root = pathlib.Path(folder.name)
        for part in PARTS:
            (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(
                ROOT / part, root / part)
        (root / "build/explorer").mkdir(parents=True)
        (root / "build/explorer/index.html").write_text("")
        for name, text in pages.items():
            (root / (name + ".md")).write_text("# Title\n\n" + text + "\n")
        (root / "core").mkdir()
        (root / "core/thing.h").write_text(HEADER)
        picture = "data:image/svg+xml;base64," + base64.b64encode(
            (PICTURE % self.stroke).encode()).decode()
        (root / "steps.ipynb").write_text(json.dumps(NOTEBOOK) % picture)
        self.built = build(root, root / "book", *self.options)
        return root / "book"

    def page(self, text):
        page = (self.site(README=text) / "index.html").read_text()
        self.assertEqual((self.built.returncode, self.built.stderr), (0, ""))
        return page

    def test_a_refused_formula_fails_with_its_page(self):
        self.site(README=r"Half: $\fraction{1}{2}$.")
        self.assertEqual(self.built.returncode, 1)
        self.assertRegex(self.built.stderr, r"README\.md.*\\fraction")

    def test_a_formula_keeps_its_comma_and_loses_the_space_github_needs(self):
        page = self.page("Both ($x = 1$), $y$: 量（ $z$ 个）， $t$。")
        text = re.sub("<math.*?</math>|<[^>]*>", "", re.search(
            "<p>Both.*?</p>", page, re.S)[0])
        self.assertRegex(text, r"Both \(x=1\), y: 量（z 个），t。")
        for end in ("),</span> ", ":</span> ", "。</span></p>"):
            self.assertIn("</span></span>" + end, page)

    def test_the_old_site_stays_until_another_is_whole(self):
        site = self.site(README="[There](there.md)", there="Text")
        (self.root / "there.md").unlink()
        self.assertEqual(build(self.root, site, "--no-api").returncode, 1)
        self.assertTrue((site / "there.html").is_file())
        (self.root / "README.md").write_text("# Title\n\nOther\n")
        self.assertEqual(build(self.root, site, "--no-api").returncode, 0)
        self.assertFalse((site / "there.html").exists())
        self.assertEqual([*self.root.glob("book?*")], [])

    def test_a_missing_file_fails_with_its_page(self):
        self.site(README="[There](not/here.h)")
        self.assertEqual(self.built.returncode, 1)
        self.assertRegex(self.built.stderr, "README.md.*no such file: not/here.h")

    def test_badges_are_gone_and_links_to_other_hosts_stay(self):
        page = self.page("[![ok](https://badge.example/a.svg)](https://a.example)\n"
                         "[![ok](../../actions/a.svg)](../../actions/a)\n\n"
                         "[Far](https://far.example/)")
        self.assertNotIn("badge.example", page)
        self.assertNotIn("actions", page)
        self.assertNotIn("a.example/", page.replace("far.example/", ""))
        self.assertIn('href="https://far.example/"', page)

    def test_headings_have_the_anchors_of_github(self):
        page = self.page("[1](#again-1)\n\n## A `b_c`: d, e-f\n\n"
                         "## Again\n\n## Again")
        for anchor in ("a-b_c-d-e-f", "again", "again-1"):
            self.assertIn(f'id="{anchor}"', page)

    def test_sources_have_pages_with_lines_and_neighbours(self):
        site = self.site(README="[words](chapters/table/spelling.py#L3), "
                                "[all](chapters/table)")
        page = (site / "chapters/table/spelling.py.html").read_text()
        self.assertIn('<span id="L3">', page)
        self.assertIn(">1\n2\n3\n", page)
        self.assertIn('href="page.js.html"', page)
        self.assertIn('href="spelling.py.html"',
                      (site / "chapters/table/files.html").read_text())

    def test_plans_open_in_the_explorer_where_its_form_has_all(self):
        links = {
            "--model gpt-13b --nodes 8 --batch 1024":
                {"model": "gpt-13b", "cluster": "dgx-a100", "nodes": "8"},
            "--model llama-3.1-8b --cluster dgx-h100 --world-size 64 --batch 512"
            " --top=3 | sed 1d":
                {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": "8",
                 "seq": ""},
            "--model gpt-13b --nodes 8 --batch 64 --no-offload": None,
            "--model gpt-13b --world-size 4 --batch 64": None,
            "--model config.json --nodes 1 --batch 64": None,
            "--model gpt-13b": None,
        }
        for words, fields in links.items():
            page = self.page(f"```console\n$ ./shardbook plan {words}\n```")
            found = re.search(r'href="explorer/index.html#([^"]*)"', page)
            self.assertEqual(bool(found), fields is not None, words)
            if fields:
                given = dict(urllib.parse.parse_qsl(
                    html.unescape(found[1]), keep_blank_values=True))
                self.assertEqual(given, {**given, **fields})

    def test_notebooks_show_what_they_printed(self):
        site = self.site(README="[Steps](steps.ipynb)")
        page = (site / "steps.html").read_text()
        for part in ("make_thing", "# high</p>", "eight", 'id="it"', 'href="#it"'):
            self.assertIn(part, page)
        self.assertNotIn("seven", page)

    def test_pictures_of_notebooks_are_dark_on_dark_pages(self):
        page = (self.site(README="Text") / "steps.html").read_text()
        text = base64.b64decode(re.search("base64,([^\"]*)", page)[1]).decode()
        dark = re.search(r"<style>@media\(prefers-color-scheme:dark\){(.*)}</style>",
                         text)[1]
        xml.etree.ElementTree.fromstring(text)
        self.assertEqual({*re.findall(r'\[([^]]*)\]{([^}]*)}', dark)}, {
            ('fill="#1c1e21"', "fill:#e6e8ea"), ('fill="#ffffff"', "fill:#14161a"),
            ('fill="#9a7108"', "fill:#d9b24c"),
            ('stroke="#1c1e21"', "stroke:#e6e8ea")})
        self.stroke = "#123456"
        self.site(README="Text")
        self.assertRegex(self.built.stderr, "steps.*#123456 has no colour for dark")

    @unittest.skipUnless(shutil.which("doxygen"), "no Doxygen here")
    def test_names_of_the_api_are_links(self):
        self.options = []
        page = self.page("Call `make_thing(2)`, `make_thing` or `parts`.")
        self.assertEqual(page.count('href="core/thing.h.html#L6"'), 1)
        book = pathlib.Path(self.root, "book")
        self.assertIn("Makes a thing.", (book / "api.html").read_text())
        self.assertIn('href="#core/thing.h"', (book / "api.html").read_text())
        header = (book / "core/thing.h.html").read_text()
        self.assertIn('<a href="thing.h.html#L4">OneThing</a> <a', header)

    def test_the_report_links_into_the_site(self):
        site = self.site(**{"README": "Text", "chapters/README": "Text"})
        report = self.root / "build/report.html"
        planner = "<p>A model of your own, planned in a browser: {}</p>"
        command = "<code>./shardbook explore</code>"
        link = '<a href="explorer/index.html">the explorer</a>'
        self.assertNotIn("report.html", (site / "index.html").read_text())
        for written in (command, link):
            report.write_text('<a href="../chapters/02_ddp/README.md">' +
                              planner.format(written))
            build(self.root, site, *self.options)
            self.assertEqual((site / "report.html").read_text(),
                             '<a href="chapters/02_ddp/index.html">' +
                             planner.format(link))
        self.assertIn('href="report.html#lang=en"',
                      (site / "index.html").read_text())
        (self.root / "build/explorer/index.html").unlink()
        build(self.root, site, *self.options)
        self.assertIn(command, (site / "report.html").read_text())

    def test_the_other_language_is_a_click_away(self):
        site = self.site(**{
            "chapters/README": "Text",
            "README": "English | [简体中文](README.zh-CN.md)\n\nText",
            "README.zh-CN": "[English](README.md) | 简体中文\n\n"
                            "```console\n$ ./shardbook plan --nodes 8 --batch 64\n```"})
        page = (site / "index.html").read_text()
        chinese = (site / "index.zh-CN.html").read_text()
        self.assertIn('href="index.zh-CN.html"', page)
        self.assertIn('<html lang="zh-CN">', chinese)
        self.assertIn('href="index.html" lang="en">English', chinese)
        self.assertNotIn("| 简体中文", chinese)
        self.assertIn('data-dark="深色"', chinese)
        self.assertIn('href="explorer/index.html#lang=en"', page)
        self.assertIn('href="explorer/index.html#lang=zh-CN"', chinese)
        self.assertIn('href="explorer/index.html#lang=zh-CN&amp;model=', chinese)


class Book(unittest.IsolatedAsyncioTestCase):
    """All of it."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.site = pathlib.Path(folder.name) / "book"
        cls.built = build(ROOT, cls.site, "--no-api")
        cls.pages = {path: path.read_text("utf-8")
                     for path in sorted(cls.site.rglob("*.html"))}

    def test_the_build_has_no_warning(self):
        self.assertEqual((self.built.returncode, self.built.stderr), (0, ""))
        self.assertGreater(len(self.pages), 500)
        # With the API, the explorer and the report of a whole run, 40 MB
        self.assertLess(sum(path.stat().st_size for path in self.site.rglob("*")
                            if path not in self.built_apart()), 34e6)

    def built_apart(self):
        """As one file each, with tests of their own."""
        return [self.site / "explorer/index.html", self.site / "report.html"]

    def own_pages(self):
        return {path: text for path, text in self.pages.items()
                if path not in self.built_apart()}

    def test_all_that_is_named_is_there(self):
        ids = {path: set(re.findall(r'\bid="([^"]*)"', text))
               for path, text in self.pages.items()}
        wrong, count = [], 0
        named = [(path, name) for path, text in self.own_pages().items()
                 for name in re.findall(
                     r'<[^>]*\b(?:href|src|srcset|action)="([^"]*)"', text)]
        for style in self.site.rglob("*.css"):
            named += [(style, name.strip("\"'")) for name in re.findall(
                r"url\(([^)]*)\)", style.read_text("utf-8"))]
        for path, name in named:
            url = urllib.parse.urlsplit(html.unescape(name))
            if url.scheme in ("https", "http", "data", "mailto"):
                continue
            count += 1
            target = path
            if url.path:
                target = (path.parent / urllib.parse.unquote(url.path)).resolve()
            anchor = urllib.parse.unquote(url.fragment)
            is_choice = anchor.startswith("lang=")
            if not target.is_file() or (
                    anchor and not is_choice and anchor not in ids[target]):
                wrong.append(f"{path.relative_to(self.site)}: {name}")
        self.assertEqual(wrong, [])
        self.assertGreater(count, 20000)

    def test_both_languages_have_the_same_things_to_touch(self):
        things = {path.relative_to(self.site).as_posix():
                  re.findall(r'data-touch="(\w+)"', text)
                  for path, text in self.pages.items()}
        self.assertEqual(sum(map(len, things.values())), 10)
        for name, found in things.items():
            other = things.get(name.replace(".zh-CN.html", ".html"), [])
            self.assertEqual(other, found, name)

    def test_no_page_asks_another_host(self):
        for path, text in self.own_pages().items():
            for name in re.findall(
                    r'<(?:img|script|source|iframe|link)\b[^>]*?'
                    r'\b(?:src|srcset|href)="([^"]*)"', text):
                self.assertRegex(name, r"^(?!\w+:|//)|^data:", path)
        for style in self.site.rglob("*.css"):
            self.assertNotRegex(style.read_text("utf-8"), r"url\(.?(https?:|//)")

    def test_pages_follow_each_other_as_they_say(self):
        for name, after in (("chapters/00_single_device/index", "../before.html"),
                            ("chapters/before", "01_data_parallel/index.html"),
                            ("chapters/06_1f1b/index.zh-CN",
                             "../07_tensor_parallel/index.zh-CN.html"),
                            ("chapters/06_1f1b/details",
                             "../../notebooks/06_1f1b.html")):
            page = self.pages[self.site / (name + ".html")]
            self.assertIn(f'rel="next" href="{after}"', page, name)
        # Contents have the pages that one language has
        alone = "chapters/tutorials.zh-CN.html"
        self.assertIn(alone, self.pages[self.site / "index.zh-CN.html"])
        self.assertNotIn(alone, self.pages[self.site / "index.html"])

    async def test_a_browser_shows_all_pages_without_an_error(self):
        page = await self.browser()
        await page.call("Page.enable")
        await page.call("Page.addScriptToEvaluateOnNewDocument", source="""
          window.mistakes = [];
          const note = (text) => mistakes.push(String(text));
          console.error = note;
          addEventListener("error", (event) => note(
              event.message ?? event.target.src ?? event.target.href), true);
          addEventListener("unhandledrejection", (event) => note(event.reason));
        """)
        # Pages of sources have one form: every tenth of them, or all if asked
        pages = self.own_pages()
        sources = [path for path in pages if 'class="lines"' in pages[path]]
        step = 1 if os.environ.get("SHARDBOOK_ALL_PAGES") else 10
        for path in sorted({*pages} - {*sources}) + sources[::step]:
            await self.show(page, path)
            pages_colours = set()
            for scheme in ("dark", "light"):
                await page.call("Emulation.setEmulatedMedia", features=[
                    {"name": "prefers-color-scheme", "value": scheme}])
                pages_colours.add(await page.value(
                    "getComputedStyle(document.body).backgroundColor"))
            self.assertEqual(len(pages_colours), 2, path)
            self.assertEqual(await page.value(
                "[...mistakes, ...performance.getEntriesByType('resource')"
                ".map((each) => each.name).filter((name) => !/^(file|data):/"
                ".test(name))]"), [], path)

    async def test_pages_fit_a_telephone_and_pictures_stay_readable(self):
        page = await self.browser()
        await page.call("Emulation.setDeviceMetricsOverride", width=390,
                        height=800, deviceScaleFactor=1, mobile=True)
        for name in ("index", "chapters/06_1f1b/index", "chapters/running",
                     "chapters/07_tensor_parallel/index",
                     "notebooks/06_1f1b", "chapters/06_1f1b/schedules.h"):
            await self.show(page, self.site / (name + ".html"))
            self.assertLessEqual(
                await page.value("document.documentElement.scrollWidth"), 390,
                name)
        # The figures' smallest text has 12 of their own pixels; a thing to touch
        # has its picture folded
        await self.show(page, self.site / "chapters/06_1f1b/index.html")
        await page.value("document.querySelectorAll('img').forEach("
                         "(img) => { img.loading = 'eager'; })")
        await page.until("[...document.images].every((img) => img.complete)",
                         "figures")
        self.assertEqual(await page.value(
            "[...document.querySelectorAll('figure img')].filter((img) => "
            "img.checkVisibility() && "
            "img.offsetWidth < 10 / 12 * img.naturalWidth - 1)"
            ".map((img) => img.src)"), [])

    async def test_everybody_can_read_and_use_the_pages(self):
        page = await self.browser()
        checks = (ROOT / "tests/report/accessible.js").read_text("utf-8")
        for name in ("index", "index.zh-CN", "chapters/06_1f1b/index",
                     "chapters/12_sequence_parallel/index", "chapters/running",
                     "notebooks/06_1f1b"):
            # Layouts by width, colours by scheme
            for width, scheme in ((390, "light"), (768, "dark"), (1400, "light"),
                                  (1400, "dark")):
                await page.call("Emulation.setEmulatedMedia", features=[
                    {"name": "prefers-color-scheme", "value": scheme}])
                await page.call("Emulation.setDeviceMetricsOverride", width=width,
                                height=900, deviceScaleFactor=1, mobile=False)
                await self.show(page, self.site / (name + ".html"))
                await page.value(checks)
                for check in ('brokenRules(["h1", "main", "header", '
                              '"nav[aria-label]"])', "paleParts()"):
                    self.assertEqual(await page.value(check), [],
                                     f"{check}, {name}, {scheme}, {width}")
            count = await page.value("watchFocus()")
            self.assertGreater(count, 30)
            await page.press(*["Tab"] * count)
            self.assertEqual(await page.value("reached"),
                             [[i, True] for i in range(count)], name)

    async def test_pictures_follow_the_switch(self):
        page = await self.browser()
        await page.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "light"}])
        await self.show(page, self.site / "index.html")
        shown = ("(() => { const img = document.querySelector('picture img');"
                 "img.loading = 'eager'; return getComputedStyle(img).colorScheme"
                 " + ' ' + img.currentSrc.split('/').pop(); })()")
        await page.until(shown + " === 'light report.png'", "a light picture")
        await page.click("#theme")
        await page.until(shown + " === 'dark report_dark.png'", "a dark picture")

    async def test_the_search_finds_without_a_network(self):
        page = await self.browser()
        for name, words, expected in (
                ("search", "weight stashing", "PipeDream"),
                ("search", "two devices", "Shardbook: Two devices against one"),
                ("search.zh-CN", "数据并行", "目录")):
            await page.call("Page.navigate", url=(
                self.site / (name + ".html")).as_uri()
                + "?" + urllib.parse.urlencode({"q": words}))
            await page.until(
                "document.querySelectorAll('#found a').length > 0", words)
            text = await page.value("document.body.innerText")
            self.assertIn(expected, text)
            self.assertNotRegex(text, r"<img|\\frac")

    async def test_paper_has_the_picture_of_a_thing_to_touch(self):
        page = await self.browser()
        await self.show(page, self.site / "chapters/06_1f1b/index.html")
        await page.call("Emulation.setEmulatedMedia", media="print")
        shown = "[...document.querySelectorAll('img[src$=\"orders.svg\"]')]" \
                ".filter((img) => img.offsetWidth > 0).length"
        await page.value("dispatchEvent(new Event('beforeprint'))")
        self.assertEqual(await page.value(shown), 1)
        await page.value("document.querySelector('.touch').replaceChildren('')")
        self.assertEqual(await page.value(shown), 1)
        # What is long begins where it stands
        self.assertEqual(await page.value("getComputedStyle(document."
                         "querySelector('.scroll')).breakInside"), "auto")

    async def test_pages_do_not_move_as_they_come(self):
        await self.browser()  # or skips this
        import first_paint
        for name in ("index", *first_paint.PAGES[:2]):
            for width in (390, 1280):
                paint, moved = await first_paint.visit(
                    (self.site / (name + ".html")).as_uri(), width)
                self.assertGreater(paint, 0)
                self.assertEqual(moved, 0, f"{name}, {width}")

    async def show(self, page, path):
        await page.call("Page.navigate", url=path.as_uri())
        await page.call("Runtime.evaluate", awaitPromise=True, expression="""
            document.readyState === "complete" ||
                new Promise((loaded) => addEventListener("load", loaded))""")

    async def browser(self):
        try:
            import devtools
        except ImportError as missing:
            self.skipTest(str(missing))
        if not devtools.find_browser():
            self.skipTest("no Chromium here")
        page = devtools.Page()
        self.addCleanup(page.close)
        return await page.open(devtools.find_browser(), "about:blank")


if __name__ == "__main__":
    unittest.main()
