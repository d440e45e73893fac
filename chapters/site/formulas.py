"""Formulas of the site, rendered by KaTeX in one process of node."""

import html
import json
import os
import subprocess

from docutils import nodes
from sphinx.util import logging

HERE = os.path.dirname(os.path.abspath(__file__))
LOG = logging.getLogger(__name__)


class Formulas:
    """Renders each formula once; what KaTeX refuses is a warning with its page."""

    def __init__(self):
        self.known = {}
        self.process = None

    def ask(self, tex, display):
        if self.process is None:
            # Debian's modules, which another node does not look for
            self.process = subprocess.Popen(
                ["node", os.path.join(HERE, "formulas.js")], text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "NODE_PATH": "/usr/share/nodejs"})
        question = json.dumps({"tex": tex, "displayMode": display})
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def render(self, tex, display, node):
        if (tex, display) not in self.known:
            self.known[tex, display] = self.ask(tex, display)
        answer = self.known[tex, display]
        if "error" in answer:
            LOG.warning("formula: %s", answer["error"], location=node)
        return answer.get("html", "")

    def close(self, *_):
        if self.process is not None:
            self.process.stdin.close()
            self.process.stdout.close()
            self.process.wait()


def setup(app):
    formulas = Formulas()

    def visit(translator, node, display):
        formula = formulas.render(node.astext(), display, node)
        if not display:  # what stands next to it stays there (pages.py)
            formula = (f'<span class="formula">{html.escape(node.get("head", ""))}'
                       + formula.replace('</span><span class="base">',
                                         '</span><wbr><span class="base">')
                       + f'{html.escape(node.get("tail", ""))}</span>')
        translator.body.append(formula)
        raise nodes.SkipNode

    app.add_html_math_renderer(
        "katex",
        inline_renderers=(lambda self, node: visit(self, node, False), None),
        block_renderers=(lambda self, node: visit(self, node, True), None))
    app.connect("build-finished", formulas.close)
    return {"version": "1", "parallel_read_safe": False}
