"""The site's pages: links and pictures as GitHub shows them, the contents, and
what the search knows. An extension of Sphinx."""

import base64
import glob
import html
import itertools
import json
import os
import re
import shlex
import urllib.parse

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

import api
import sources
from layout import ROOT, docname_of

HERE = os.path.dirname(os.path.abspath(__file__))
LOG = logging.getLogger(__name__)
CHINESE = ".zh-CN"
# Pictures whose place a thing to touch takes, where scripts run
TOUCH = {"chapters/06_1f1b/orders.svg": "schedule",
         "chapters/03_zero_fsdp/states.svg": "zero",
         "chapters/12_sequence_parallel/mask.svg": "mask",
         "chapters/before_collectives.svg": "collectives",
         "chapters/11_dtensor/moves.svg": "mesh"}
# The planner's defaults that the explorer's form does not share, and what only
# changes what is printed
PLAN = {"model": "gpt-13b", "cluster": "dgx-a100", "dtype": "bf16", "seq": ""}
PRINTED = {"by-strategy", "explain", "confirm", "write-config", "top"}

SCRIPT_WORDS = ["copy", "copied", "select", "found", "none"]

with open(os.path.join(HERE, "theme", "words.json"), encoding="utf-8") as file:
    WORDS = json.load(file)


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def language_of(docname):
    return "zh-CN" if docname.endswith(CHINESE) else "en"


# ---- Links

def resolve(page, uri):
    """The address, from the page `page`, of what a link in its source names."""
    url = urllib.parse.urlsplit(uri)
    if url.scheme or url.netloc or not url.path:
        return uri
    folder = os.path.dirname(page)
    path = os.path.normpath(os.path.join(folder, urllib.parse.unquote(url.path)))
    full = os.path.join(ROOT, path)
    if os.path.isdir(full) and not os.path.exists(os.path.join(full, "README.md")):
        sources.folders.add(path)
        to = os.path.join(path, "files.html")
    elif os.path.isdir(full):
        to = os.path.join(path, "index.html")
    elif docname_of(path):
        to = docname_of(path) + ".html"
    elif path.endswith((".svg", ".png")):
        sources.pictures.add(path)
        to = path
    else:
        sources.folders.add(os.path.dirname(path))
        sources.anchors[path].update(re.findall(r"^L\d+$", url.fragment))
        to = path + ".html"
    if not os.path.exists(full):
        LOG.warning("no such file: %s", uri, location=page)
    anchor = "#" + url.fragment if url.fragment else ""
    return urllib.parse.quote(os.path.relpath(to, folder or ".")) + anchor


def slug(title, taken):
    """The anchor that GitHub gives a heading."""
    base = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
    name, number = base, 0
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name


# ---- Pictures

def size_of(path):
    """Width and height of a picture, and its smallest text, in its own units."""
    if path.endswith(".png"):
        with open(os.path.join(ROOT, path), "rb") as file:
            head = file.read(24)
        return *(int.from_bytes(head[i:i + 4], "big") for i in (16, 20)), None
    text = (base64.b64decode(path.partition(",")[2]).decode()
            if path.startswith("data:") else read(path))
    width, height = map(float, re.search(
        r'viewBox="\S+ \S+ ([\d.]+) ([\d.]+)"', text).groups())
    return width, height, min(
        map(float, re.findall(r'font-size(?:="|: ?)([\d.]+)', text)),
        default=None)


def with_dark_colours(page, source):
    """A notebook's picture, which has the light colours of the report's style."""
    kind, text = source.split(",", 1)
    if kind != "data:image/svg+xml;base64":
        return source
    body, end, _ = base64.b64decode(text).decode().rpartition("</svg>")
    light, dark = (dict(re.findall(r"(--[\w-]+): (#\w+)", part)) for part in
                   read("chapters", "table", "report.css").split("@media")[:2])
    # White, the paper here, is last the text on blocks, as dark as the page. The
    # pale blue is behind ranks on a mesh, and has ink on it.
    pairs = {**{light[name]: dark[name] for name in light}, "#d5e3f2": "#28425f"}
    rules = ""
    for name, old in sorted({*re.findall(r'(fill|stroke)="(#\w+)"', body)}):
        if old not in pairs:
            LOG.warning("picture: %s has no colour for dark pages", old,
                        location=page)
        rules += f'[{name}="{old}"]{{{name}:{pairs.get(old)}}}'
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>"
    text = base64.b64encode(f"{body}{style}{end}".encode()).decode()
    return f"{kind},{text}"


def picture(page, attributes):
    """An <img> with its size, so that nothing moves when it comes. No text in it
    becomes smaller than 10 px: a narrow screen scrolls instead."""
    source = path = attributes["src"]
    if source.startswith("data:"):
        source = with_dark_colours(page, source)
    else:
        path = os.path.normpath(os.path.join(os.path.dirname(page), source))
        source = resolve(page, source)
    width, height, text = size_of(path)
    shown = float(attributes.get("width", width))
    least = (f' style="min-width: {10 * width / text:.0f}px"'
             if text and shown >= width else "")
    return (f'<img src="{source}" width="{shown:.0f}" '
            f'height="{shown * height / width:.0f}" loading="lazy"{least} '
            f'alt="{html.escape(attributes.get("alt", ""))}">')


def figure(page, node):
    """A thing to touch keeps its picture, which the text names and paper shows."""
    kind = TOUCH.get(os.path.normpath(os.path.join(
        os.path.dirname(page), node["uri"].replace(CHINESE + ".svg", ".svg"))))
    still = f"<figure>{picture(page, attributes_of(node))}</figure>"
    if not kind:
        return still
    return (still.replace("<figure", f'<figure class="touch" data-touch="{kind}"')
            + '<details class="still"><summary>'
            + f"{WORDS[language_of(page)]['still']}</summary>{still}</details>")


def attributes_of(node):
    return {"src": node["uri"], "alt": node.get("alt", "")}


def adapt_raw(page, text):
    """Links and pictures of HTML in a page."""
    def image(tag):
        return picture(page, {name: html.unescape(value) for name, value in
                              re.findall(r'(\w+)="([^"]*)"', tag[0])})
    text = re.sub(r"<img [^>]*>", image, text)
    return re.sub(r'(<(?:source|a)\b[^>]*?(?:srcset|href)=")([^"]*)"',
                  lambda found: f'{found[1]}{resolve(page, found[2])}"', text)


# ---- Commands of the planner

def explorer_address(command, fields, language):
    """The explorer's address of a planner's job; None if its form lacks a part."""
    # Up to a pipe or a comment, which quotes may hold
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(itertools.takewhile(lambda word: word != "|", lexer))[2:]
    given = {}
    while words:
        name, _, value = words.pop(0).partition("=")
        name = name.lstrip("-")
        if not value and words and not words[0].startswith("-"):
            value = words.pop(0)
        given[name] = value
    job = {**PLAN, **{name: value for name, value in given.items()
                      if name not in PRINTED}}
    if "world-size" in job:
        try:
            devices = json.loads(read("sim", "clusters", job["cluster"]
                                      + ".json"))["devices_per_node"]
        except (OSError, KeyError):
            return None
        nodes_, rest = divmod(int(job.pop("world-size")), devices)
        if rest:
            return None
        job["nodes"] = str(nodes_)
    if not {"nodes", "batch"} <= set(job) <= set(fields) or any(
            job[name] not in fields[name] for name in ("model", "cluster")):
        return None
    return "explorer/index.html#" + urllib.parse.urlencode({"lang": language, **job})


def explorer_fields():
    """The fields of the explorer's form, and the values of its lists."""
    folder = os.path.join(ROOT, "chapters", "explorer")
    names = re.findall(r'name="([\w-]+)"', read(folder, "explorer.html"))
    script = "".join(map(read, sorted(glob.glob(os.path.join(folder, "*.js")))))
    return {name: re.findall(r'"([^"]*)"', found[1])
            if (found := re.search(rf'"?{name}"?: \[([^\]]*)\]', script)) else ""
            for name in names}


def link_commands(app, doctree):
    page = app.env.docname
    for block in doctree.findall(nodes.literal_block):
        text = block.astext().replace("\\\n", " ")
        for line in re.findall(r"(?m)^(?:\$ )?(\./shardbook plan .*)", text):
            address = explorer_address(line, app.explorer, language_of(page))
            if address and app.has_explorer:
                to = os.path.relpath(address, os.path.dirname(page) or ".")
                block.parent.insert(block.parent.index(block) + 1, raw(
                    f'<p class="tools"><a href="{html.escape(to)}">'
                    f'{WORDS[language_of(page)]["explorer"]}</a></p>'))
                break


def link_names(app, doctree):
    """Code that is a name of the API leads to its declaration."""
    folder = os.path.dirname(app.env.docname) or "."
    for node in list(doctree.findall(nodes.literal)):
        name = node.astext().removesuffix("()").rpartition("::")[2]
        is_name = re.search("[A-Z_]|::|\\(", node.astext())
        if is_name and name in app.names and isinstance(
                node.parent, (nodes.paragraph, nodes.list_item)):
            to = os.path.relpath(app.names[name], folder)
            node.replace_self(
                nodes.reference("", "", node.deepcopy(), refuri=to))


def raw(text):
    return nodes.raw("", text, format="html")


def hold_together(node):
    """No line begins with the comma behind a formula, or ends with the bracket
    before it. The space that GitHub needs behind a wide sign goes."""
    parent, at = node.parent, node.parent.index(node)
    for key, place, pattern in (("head", at - 1, r"([(（“]?)((?<=[，。：；、？！）（“])\s)?$"),
                                ("tail", at + 1, r"^([^\w\s(（“]*)()")):
        text = parent[place] if 0 <= place < len(parent) else None
        if isinstance(text, nodes.Text):
            node[key] = re.search(pattern, text)[1]
            parent[place] = nodes.Text(re.sub(pattern, "", text, count=1))


# ---- A page as its source has it becomes one of the site

class Adapt(SphinxTransform):
    default_priority = 200

    def apply(self):
        page = self.env.docname
        taken = set()
        for section in self.document.findall(nodes.section):
            section["ids"] = [slug(section[0].astext(), taken)]
        for node in list(self.document.findall(nodes.raw)):
            node.replace_self(raw(adapt_raw(page, node.astext())))
        for node in list(self.document.findall(nodes.image)):
            self.adapt_image(page, node)
        for node in self.document.findall(nodes.reference):
            if "refuri" in node:
                node["refuri"] = resolve(page, node["refuri"])
        for node in list(self.document.findall(nodes.math)):
            if not isinstance(node.parent, nodes.title):  # contents read those
                hold_together(node)
        # The site has its own switch between the languages
        for node in list(self.document.findall(nodes.paragraph))[:1]:
            if re.fullmatch(r"(English( \| )?)?(简体中文)?", node.astext()):
                node.parent.remove(node)

    def adapt_image(self, page, node):
        parent = node.parent
        path = os.path.join(os.path.dirname(page), node["uri"])
        if "://" in path or os.path.normpath(path).startswith(".."):  # a badge
            parent.remove(node)
            while not parent.astext().strip():
                parent, gone = parent.parent, parent
                parent.remove(gone)
        elif isinstance(parent, nodes.paragraph) and len(parent) == 1:
            parent.replace_self(raw(figure(page, node)))
        else:
            node.replace_self(raw(picture(page, attributes_of(node))))


# ---- Contents

def reading_order(docs):
    """(heading, [(page, depth)...]) by the pages' English names; each once."""
    left = {doc.removesuffix(CHINESE) for doc in docs}

    def take(*patterns):
        for pattern in patterns:
            for doc in sorted((doc for doc in left if re.fullmatch(pattern, doc)),
                              key=lambda doc: (not doc.endswith("index"), doc)):
                left.discard(doc)
                yield doc

    groups = [("chapters", [])]
    for chapter in list(take("index", "chapters/00_.*/index", "chapters/before",
                             r"chapters/\d\d_\w+/index")):
        groups[0][1].append((chapter, 0))
        folder = os.path.dirname(chapter)
        if not re.search(r"/\d\d_", folder):
            continue
        groups[0][1].extend((doc, 1) for doc in take(
            rf"{folder}/(?!details).*", rf"{folder}/details",
            f"notebooks/{os.path.basename(folder)}"))
    for heading, patterns in (
            ("reference", [r"chapters/(index|details)", r"chapters/\w+",
                           "chapters/.*"]),
            ("measurements", ["bench/index", "bench/.*", "findings/.*"]),
            ("notebooks", ["notebooks/index", "notebooks/.*"]), ("more", [".*"])):
        groups.append((heading, [(doc, 0) for doc in take(*patterns)]))
    return [(heading, pages) for heading, pages in groups if pages]


def add_context(app, pagename, templatename, context, doctree):
    """What page.html shows around the text."""
    docs = app.env.found_docs
    language = language_of(pagename)
    base = pagename[:-len(CHINESE)] if language != "en" else pagename
    groups = app.order = getattr(app, "order", None) or reading_order(docs)

    def here(doc):  # the page in the reader's language, where there is one
        return doc + CHINESE if language != "en" and doc + CHINESE in docs else doc

    def entry(doc):
        chapter = re.match(r"chapters/(\d\d)_\w+/index$", doc)
        number = chapter[1] + " " if chapter else ""
        doc = here(doc)
        return doc, number + app.env.titles[doc].astext()

    groups = [(heading, [(doc, depth) for doc, depth in list_ if here(doc) in docs])
              for heading, list_ in groups]
    depths = {doc: depth for _, list_ in groups for doc, depth in list_}
    # From chapter to chapter; from a page inside of one to its next page
    pages = [doc for doc, depth in depths.items() if not depth or depths.get(base)]
    place = pages.index(base) if base in pages else None
    other = base if language != "en" else base + CHINESE
    context.update(
        lang=language, words=WORDS[language],
        script_words={name: WORDS[language][name] for name in SCRIPT_WORDS},
        groups=[(heading, [(*entry(doc), depth) for doc, depth in list_])
                for heading, list_ in groups],
        before=entry(pages[place - 1]) if place else None,
        after=(entry(pages[place + 1])
               if place is not None and place + 1 < len(pages) else None),
        other=other if other in docs else None,
        has_api=bool(app.entries), has_explorer=app.has_explorer,
        has_report=app.has_report, has_touch=app.has_touch)
    if "body" in context:
        body = context["body"]
        for pattern, better in (
                ("(&nbsp;|\xa0){4,}", ""),  # headings need none to be wide here
                (r"<th\b([^>]*)>(\s|<p>|</p>)*</th>", r"<td\1></td>"),
                (r"<th\b(?![^>]*scope)", r'\g<0> scope="col"'),
                (r"(?s)<table\b.*?</table>", r'<div class="scroll">\g<0></div>')):
            body = re.sub(pattern, better, body)
        context["body"] = body
    return "page.html"


# ---- Search: all text of all sections, in one script

def text_of(node):
    if isinstance(node, nodes.raw):
        return ""
    if not node.children or not list(node.findall(nodes.raw)):
        return node.astext()
    return " ".join(map(text_of, node.children))


def add_to_search(app, doctree, docname):
    sections = []
    for section in doctree.findall(nodes.section):
        text = " ".join(text_of(child) for child in section[1:]
                        if not isinstance(child, nodes.section))
        sections.append([section["ids"][0], section[0].astext(),
                         " ".join(text.split())])
    app.search[docname] = [docname + ".html", language_of(docname), sections]


def write_search(app, exception):
    docs = app.env.found_docs
    if exception is None:
        for each in app.entries:
            app.search.setdefault(each.header, [
                each.header + ".html", "en", [["", each.header, ""]]])[2].append(
                    [f"L{each.line}", each.name, each.brief])
        path = os.path.join(app.outdir, "_static", "sections.js")
        order = [doc for _, list_ in app.order for doc, _ in list_]
        pages = sorted(app.search.items(), key=lambda item: order.index(
            item[0].removesuffix(CHINESE)) if item[0] in docs else len(order))
        with open(path, "w", encoding="utf-8") as file:
            file.write("const PAGES = " + json.dumps(
                [page for _, page in pages], ensure_ascii=False,
                separators=(",", ":")) + ";\n")


def begin(app):
    app.builder.search = False  # Sphinx's own
    app.search = {}
    app.search_pages = {"": WORDS["en"]["search"], CHINESE: WORDS["zh-CN"]["search"]}
    app.entries = api.entries() if app.config.with_api else []
    app.names = api.addresses(app.entries)
    app.explorer = explorer_fields()
    app.has_explorer, app.has_report, app.has_touch = (
        os.path.exists(os.path.join(app.outdir, name)) for name in
        ("explorer/index.html", "report.html", "_static/touch.js"))


def is_in_no_toctree(app, doctree):
    app.env.metadata[app.env.docname]["orphan"] = True


def setup(app):
    app.add_config_value("with_api", False, "html")
    app.add_transform(Adapt)
    app.add_lexer("csv", TextLexer)
    app.add_lexer("meson", TextLexer)
    app.connect("builder-inited", begin)
    app.connect("doctree-read", is_in_no_toctree)
    app.connect("doctree-read", link_commands)
    app.connect("doctree-read", link_names)
    app.connect("doctree-resolved", add_to_search)
    app.connect("html-collect-pages", sources.collect)
    app.connect("html-page-context", add_context)
    app.connect("build-finished", write_search)
    return {"version": "1", "parallel_read_safe": False}
