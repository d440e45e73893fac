"""Builds the things to touch: one script that pages need, and a page of all.

  build_touch.py EM++ BUILD FOLDER FRAMES

FRAMES is the program that prints the frames of collectives. The script,
FOLDER/touch.js, has the module of WebAssembly inside and takes the place of
what is in <figure data-touch="..."> (touch/touch.js).
"""

import json
import os
import re
import subprocess
import sys

from build_explorer import (HERE, ROOT, build_modules, own_sources, packed, read,
                            words_of, write)

TOUCH = os.path.join(HERE, "touch")
NAMES = ["schedule", "zero", "mask", "collectives", "mesh"]
# Without tensors: all else that these files' libraries have is left out
SOURCES = [
    "chapters/explorer/schedules_module.cpp",
    "chapters/03_zero_fsdp/zero/zero_memory.cpp", "chapters/05_gpipe/gpipe.cpp",
    *(f"chapters/06_1f1b/{name}.cpp" for name in (
        "schedule_json", "schedules", "schedules_asynchronous",
        "schedules_by_name", "schedules_dualpipe", "schedules_zero_bubble")),
    "chapters/11_dtensor/moves.cpp", "chapters/11_dtensor/placement.cpp",
    "chapters/12_sequence_parallel/sequence_layout.cpp",
    *(f"chapters/common/pipeline/{name}.cpp" for name in (
        "dependencies", "replay", "replay_alive", "schedule", "schedule_check",
        "steady")),
    "comm/ledger.cpp", "core/dtype.cpp", "core/shape.cpp",
    "core/visible_pairs.cpp", "sim/json_object.cpp"]
LINK = ["-Os", "-sFILESYSTEM=0", "-sENVIRONMENT=web,node",
        "-sEXPORTED_RUNTIME_METHODS=ccall",
        "-sEXPORTED_FUNCTIONS=_shardbook_schedules"]


def style():
    """The report's colours, for figures alone: a page has its own."""
    report = read(os.path.join(ROOT, "chapters", "table", "report.css"))
    colours = report[report.index(":root"):report.index("\n* {")]
    return (re.sub(r"(:root\S*) {", r"\1 .touch {", colours)
            + read(os.path.join(TOUCH, "touch.css")))


def script(folder, frames):
    """All in one file: pages on a disk cannot read another."""
    data = {"wasm": packed(os.path.join(folder, "schedules.wasm")),
            "words": words_of(TOUCH),
            "style": style(),
            "frames": json.loads(frames)}
    return "\n".join([
        "(() => {", read(os.path.join(folder, "schedules.js")),
        f"const DATA = {json.dumps(data, ensure_ascii=False)};",
        *(read(os.path.join(TOUCH, name + ".js")) for name in ("touch", *NAMES)),
        'document.readyState === "loading"',
        '    ? addEventListener("DOMContentLoaded", start) : start();', "})();", ""])


def page(words):
    """All of them, below each other; each has its page's picture inside."""
    report = read(os.path.join(ROOT, "chapters", "table", "report.css"))
    figures = "\n".join(
        f'<section><h2>{words[name]}</h2>\n<figure class="touch" '
        f'data-touch="{name}"><p>{words["needs_scripts"]}</p></figure></section>'
        for name in NAMES)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{words["all"]}</title>
<style>
{report}
body {{ display: block; max-width: 56rem; }}
</style>
<header><h1>{words["all"]}</h1></header>
<main>
{figures}
</main>
<script src="touch.js"></script>
</html>
"""


def main(compiler, build, folder, frames):
    modules = {"schedules": (own_sources(SOURCES), ["-Os", "-fwasm-exceptions"],
                             ["-fwasm-exceptions", *LINK])}
    build_modules(compiler, build, os.path.join(folder, "schedules"), modules)
    printed = subprocess.run([frames], stdout=subprocess.PIPE, text=True,
                             check=True).stdout
    write(os.path.join(folder, "touch.js"),
          script(os.path.join(folder, "schedules"), printed))
    write(os.path.join(folder, "touch.html"),
          page(words_of(TOUCH)["en"]))


if __name__ == "__main__":
    main(sys.argv[1], *map(os.path.abspath, sys.argv[2:]))
