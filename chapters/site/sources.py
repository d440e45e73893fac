"""Pages of source files, with numbered lines, and the lists of their folders."""

import collections
import html
import os
import re
import shutil

from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.token import Comment, Keyword, Name, String
from pygments.util import ClassNotFound

import api
from layout import ROOT, breakable, docname_of, files

# Links in pages add to these
folders = set()
anchors = collections.defaultdict(set)  # of each file, such as L12
pictures = set()
KINDS = [(Comment.Preproc, "cp"), (Comment, "c"), (Keyword, "k"), (String, "s")]
SEARCH = '<h1>{}</h1><p id="count" role="status"></p><ol id="found"></ol>'
MAX_BYTES = 100_000  # of a file that no page names


def lines(path, text, names):
    """Numbered lines, in few colours: those of all tokens would triple them. In
    headers, names are links. Only lines that are named have an anchor."""
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    code = []
    for token, part in lexer.get_tokens(text):
        name = next((name for kind, name in KINDS if token in kind), None)
        to = (names.get(part) if path.endswith(".h") and token in Name
              and token not in Name.Namespace else None)
        part = html.escape(part, quote=False)
        if to:
            to = os.path.relpath(to, os.path.dirname(path))
            part = f'<a href="{to}">{part}</a>'
        code.append(part if name is None else "\n".join(
            f'<i class="{name}">{line}</i>' if line else ""
            for line in part.split("\n")))
    # Neighbours of one colour on a line are one element
    code = re.sub(r'<i class="(\w+)">[^<\n]*</i>(?: *<i class="\1">[^<\n]*</i>)+',
                  lambda run: f'<i class="{run[1]}">'
                  + re.sub("</?i[^>]*>", "", run[0]) + "</i>", "".join(code))
    code = code.rstrip("\n").split("\n")
    for anchor in anchors[path]:
        number = int(anchor[1:])
        code[number - 1] = f'<span id="{anchor}">{code[number - 1]}</span>'
    numbers = "\n".join(map(str, range(1, len(code) + 1)))
    return ('<div class="lines"><pre aria-hidden="true">' + numbers
            + "</pre><pre>" + "\n".join(code) + "</pre></div>")


def address(path):
    """Of a file's page; None if it has none."""
    docname = docname_of(path)
    if docname:
        return docname + ".html"
    if path.endswith((".svg", ".png")):
        pictures.add(path)
        return path
    return path + ".html"


def listing(folder, names, here=None):
    def item(name):
        to = os.path.relpath(address(os.path.join(folder, name)), folder or ".")
        current = ' aria-current="page"' if name == here else ""
        return f'<li><a href="{to}"{current}>{html.escape(name)}</a></li>'
    return '<ul class="files">' + "".join(map(item, names)) + "</ul>"


def has_page(path):
    with open(os.path.join(ROOT, path), "rb") as file:
        return b"\0" not in file.read(4096) and (
            path in anchors or os.path.getsize(file.name) < MAX_BYTES)


def collect(app):
    """(name, context, template) of each page: all files of each folder that a
    page's link names, or has a file of."""
    for ending, title in app.search_pages.items():
        yield "search" + ending, {
            "title": title, "body": SEARCH.format(title)}, "page.html"
    if app.entries:
        yield "api", {"title": "API", "body": api.page(app.entries)}, "page.html"
    for each in app.entries:
        folders.add(os.path.dirname(each.header))
        anchors[each.header].add(f"L{each.line}")
    by_folder = {}
    for path in files():
        folder, name = os.path.split(path)
        if folder in folders and has_page(path):
            by_folder.setdefault(folder, []).append(name)
    for folder, names in by_folder.items():
        title = folder or "Shardbook"
        yield os.path.join(folder, "files"), {
            "title": title,
            "body": f"<h1>{breakable(title)}</h1>" + listing(folder, names),
        }, "page.html"
        for name in names:
            path = os.path.join(folder, name)
            if address(path) != path + ".html":
                continue
            with open(os.path.join(ROOT, path), encoding="utf-8") as file:
                text = file.read()
            yield path, {
                "title": path, "neighbours": listing(folder, names, name),
                "folder": folder,
                "body": f"<h1>{breakable(path)}</h1>{lines(path, text, app.names)}",
            }, "page.html"
    for path in sorted(pictures):
        to = os.path.join(app.outdir, path)
        os.makedirs(os.path.dirname(to), exist_ok=True)
        shutil.copyfile(os.path.join(ROOT, path), to)
