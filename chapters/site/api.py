"""The API: what each public header declares, where, and its first sentence.

Doxygen finds the names. The text stays that of the header, whose page has line
numbers: its figures and tables of shapes are drawn by spaces.
"""

import collections
import html
import os
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ET

from layout import ROOT, breakable

OPTIONS = """
GENERATE_XML = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
EXTRACT_ALL = YES
QUIET = YES
WARNINGS = NO
WARN_IF_DOC_ERROR = NO
XML_PROGRAMLISTING = NO
INCLUDE_GRAPH = NO
INCLUDED_BY_GRAPH = NO
MACRO_EXPANSION = YES
JAVADOC_AUTOBRIEF = YES
"""


def public_headers():
    """As meson.build has them: all but those that their own room reads."""
    with open(os.path.join(ROOT, "meson.build"), encoding="utf-8") as file:
        private = re.search("private_folders = '(.*)'", file.read())[1]
    for top in ("core", "comm", "sim", "chapters", "notebooks"):
        for folder, folders, names in os.walk(os.path.join(ROOT, top)):
            folders[:] = sorted(name for name in folders
                                if not re.fullmatch(private, name))
            yield from sorted(
                os.path.relpath(os.path.join(folder, name), ROOT)
                for name in names if name.endswith(".h"))


Entry = collections.namedtuple("Entry", "name header line brief")


def entries():
    """All classes, functions, enumerations and aliases of the headers."""
    headers = list(public_headers())
    with tempfile.TemporaryDirectory() as folder:
        settings = (OPTIONS + f"OUTPUT_DIRECTORY = {folder}\nINPUT = "
                    + " ".join(os.path.join(ROOT, name) for name in headers))
        subprocess.run(["doxygen", "-"], input=settings, text=True, cwd=ROOT,
                       check=True, stdout=subprocess.DEVNULL)
        found = set()
        for name in os.listdir(os.path.join(folder, "xml")):
            path = os.path.join(folder, "xml", name)
            compound = ET.parse(path).find("compounddef")
            if compound is None:
                continue
            kind = compound.get("kind")
            if kind in ("class", "struct"):
                found.add(entry(compound, compound.findtext("compoundname")))
            elif kind == "namespace":
                for member in compound.iter("memberdef"):
                    if member.get("kind") in ("function", "enum", "typedef"):
                        found.add(entry(member, member.findtext("name")))
    return sorted(each for each in found if each.header in headers)


def entry(node, name):
    place = node.find("location")
    brief = "".join(node.find("briefdescription").itertext()).strip()
    return Entry(name.rpartition("::")[2],
                 os.path.relpath(os.path.join(ROOT, place.get("file")), ROOT),
                 int(place.get("line")), brief)


def addresses(all_entries):
    """The place of each name that one header alone declares."""
    places = collections.defaultdict(list)
    for each in all_entries:
        places[each.name].append(each)
    return {name: f"{list_[0].header}.html#L{list_[0].line}"
            for name, list_ in places.items()
            if len({each.header for each in list_}) == 1}


def page(all_entries):
    """A table of names per header, below a list of the headers' folders."""
    by_header = collections.defaultdict(list)
    for each in all_entries:
        by_header[each.header].append(each)
    folders = {}
    for header in sorted(by_header):
        folders.setdefault(os.path.dirname(header), header)
    body = ["<h1>API</h1><p>What each header declares, with its first sentence; a "
            "name leads to its line, where shapes, units and errors are.</p>",
            '<ul class="files">' + "".join(
                f'<li><a href="#{header}">{breakable(folder)}</a></li>'
                for folder, header in folders.items()) + "</ul>"]
    for header, list_ in sorted(by_header.items()):
        rows = "".join(
            f'<tr><td><a href="{header}.html#L{each.line}"><code>'
            f"{html.escape(each.name)}</code></a></td>"
            f"<td>{html.escape(each.brief)}</td></tr>"
            for each in sorted(list_, key=lambda each: each.line))
        body.append(f'<h2 id="{header}"><a href="{header}.html">'
                    f"{breakable(header)}</a></h2>"
                    f"<table>{rows}</table>")
    return "\n".join(body)
