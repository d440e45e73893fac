"""Where the pages of the site come from: files of the tree, and their names."""

import html
import json
import os
import re

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# What a build or an editor leaves in the tree is not of the book
HIDDEN = {".ci", ".github", ".devcontainer"}


def files():
    """All files of the tree, from the root."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            name for name in folders if name != "__pycache__"
            and (not name.startswith(".") or name in HIDDEN)
            and not (folder == ROOT and re.match("build|exercises$", name)))
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), ROOT)


def docname_of(path):
    """README.md is the index of its folder, as on GitHub; None: not a page."""
    name, ending = os.path.splitext(path)
    if ending not in (".md", ".ipynb"):
        return None
    folder, base = os.path.split(name)
    return os.path.join(folder, re.sub(r"^README\b", "index", base))


def breakable(path):
    """A path as HTML that a narrow page breaks between its parts."""
    return re.sub("[/_]", r"\g<0><wbr>", html.escape(path))


def notebook(path):
    """A notebook as Markdown: its text, its code, and what it printed."""
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    parts = []

    def fence(language, text):
        parts.append(f"````{language}\n{text}\n````")

    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        fence("cpp", text)
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            page = "".join(data.get("text/html", ""))
            if page:  # without empty lines, which would end it in Markdown
                page = re.sub(r"\n\s*\n", "\n", page).strip()
                parts.append(f'<div class="output">\n{page}\n</div>')
            else:
                fence("text", "".join(data["text/plain"]).rstrip())
    return "\n\n".join(parts) + "\n"


def lay_out(folder):
    """Fills a folder with the pages' sources, by their names on the site."""
    for path in files():
        docname = docname_of(path)
        if not docname:
            continue
        target = os.path.join(folder, docname + ".md")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if path.endswith(".md"):
            os.symlink(os.path.join(ROOT, path), target)
        else:
            with open(target, "w", encoding="utf-8") as file:
                file.write(notebook(path))
