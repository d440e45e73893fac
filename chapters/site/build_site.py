"""Builds the site: the pages, the notebooks as they are stored, the sources that
pages link to, the API, and what else has been built for a browser.

  build_site.py BUILD [--no-api] [--output FOLDER]
  build_site.py BUILD --serve       shows what has been built

needs Sphinx, MyST and KaTeX; for the API, Doxygen.
"""

import argparse
import base64
import contextlib
import glob
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

import layout
from layout import HERE, ROOT

KATEX = "/usr/share/javascript/katex"
TABLE = os.path.join(ROOT, "chapters", "table")


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def copy_beside(build, output):
    """What other commands have built, each in one file."""
    for name in ("explorer/index.html", "report.html"):
        path = os.path.join(build, name)
        target = os.path.join(output, name)
        if os.path.exists(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copyfile(path, target)
    report = os.path.join(output, "report.html")
    if os.path.exists(report):
        write(report, adapt_report(read(report), os.path.exists(
            os.path.join(output, "explorer", "index.html"))))


def adapt_report(page, has_explorer):
    """Its links into the book, and to the explorer, are those of the site."""
    page = re.sub(r'href="[./]+/chapters/(\w+)/README\.md"',
                  r'href="chapters/\1/index.html"', page)
    explorer = ('<a href="explorer/index.html">the explorer</a>' if has_explorer
                else "<code>./shardbook explore</code>")
    return re.sub("(planned in a browser: ).*?(?=</p>)", rf"\1{explorer}", page, 1)


def usual_fonts(style):
    """A script that has the fonts of most formulas: a page that waits for files
    would move when they arrive."""
    fonts = []
    for rule in re.findall("@font-face *{([^}]*)}", style):
        path = re.search(r"url\(([^)]*)", rule)[1]
        if re.search(r"_(Main-Regular|Main-Bold|Math-Italic|Size.*)\.", path):
            family, weight, slant = (re.search(name + r": *(\w+)", rule)[1] for name in
                                     ("family", "weight", "style"))
            with open(os.path.join(KATEX, path), "rb") as file:
                fonts.append([family, base64.b64encode(file.read()).decode(),
                              {"weight": weight, "style": slant}])
    return f"""for (const [family, data, kind] of {json.dumps(fonts)}) {{
  document.fonts.add(new FontFace(
      family, Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), kind));
}}
"""


def copy_parts(build, output):
    """Styles and scripts that the pages share with the report, and KaTeX's."""
    static = os.path.join(output, "_static")
    os.makedirs(os.path.join(static, "fonts"), exist_ok=True)
    # The colours alone; the theme has its own layout
    colours = read(TABLE, "report.css").partition("\n* {")[0]
    write(os.path.join(static, "colours.css"), colours + "\n")
    shutil.copy(os.path.join(TABLE, "page.js"), static)
    # Every browser of today reads woff2
    style = re.sub(r",url\([^)]*\.(woff|ttf)\) format\([^)]*\)", "",
                   read(KATEX, "katex.min.css"))
    write(os.path.join(static, "katex.css"), style)
    for font in glob.glob(os.path.join(KATEX, "fonts", "*.woff2")):
        shutil.copy(font, os.path.join(static, "fonts"))
    write(os.path.join(static, "fonts.js"), usual_fonts(style))
    touch = os.path.join(build, "explorer", "touch.js")
    if os.path.exists(touch):
        shutil.copy(touch, static)


def build_pages(pages, output, with_api):
    from sphinx.cmd.build import build_main
    sources = os.path.join(pages, "source")
    layout.lay_out(sources)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = build_main(
            ["-q", "-W", "--keep-going", "-b", "html", "-c", HERE,
             "-D", f"with_api={int(with_api)}",
             "-d", os.path.join(pages, "doctrees"), sources, output])
    # By the names that the pages have in the tree
    sys.stderr.write(re.sub(r"\bindex((?:\.zh-CN)?\.md)\b", r"README\1",
                            said.getvalue().replace(sources + os.sep, "")))
    return status


def serve(output):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=output)

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_):  # a browser that has gone
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/ until Ctrl+C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass


def main():
    parser = argparse.ArgumentParser(prog="./shardbook book")
    parser.add_argument("build", metavar="BUILD")
    parser.add_argument("--no-api", action="store_true")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--output")
    given = parser.parse_args()
    build = os.path.abspath(given.build)
    output = os.path.abspath(given.output or os.path.join(build, "book"))
    if given.serve:
        serve(output)
        return 0
    with_api = not given.no_api and bool(shutil.which("doxygen"))
    # The site that is there stays until this one is whole
    fresh = output + ".new"
    shutil.rmtree(fresh, ignore_errors=True)
    os.makedirs(fresh)
    copy_beside(build, fresh)
    copy_parts(build, fresh)
    with tempfile.TemporaryDirectory() as pages:
        status = build_pages(pages, fresh, with_api)
    if status:
        return 1
    for name in (".buildinfo", "objects.inv"):  # for Sphinx alone
        os.remove(os.path.join(fresh, name))
    shutil.rmtree(output, ignore_errors=True)
    os.rename(fresh, output)
    print(os.path.join(output, "index.html") + ": open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
