"""Sphinx's configuration of the site. build_site.py lays out the sources."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

project = "Shardbook"
root_doc = "index"
extensions = ["myst_parser", "formulas", "pages"]
# pages.py resolves all links, as GitHub does
myst_enable_extensions = ["dollarmath"]
myst_all_links_external = True
# Folded solutions may have a heading of any level
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
html_math_renderer = "katex"
highlight_language = "none"
html_theme = "theme"
html_theme_path = [os.path.dirname(os.path.abspath(__file__))]
html_permalinks = False
html_use_index = False
html_copy_source = False
smartquotes = False
