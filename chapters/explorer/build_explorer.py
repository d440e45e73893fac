"""Builds the explorer: the planner as a module of WebAssembly, and the page.

  build_explorer.py EM++ BUILD FOLDER

compiles into FOLDER what plan_alone is linked from, with Ninja, so that only what
has changed is compiled again; index.html there has all in one file. The module
runs one rank at a time, which is all that plans on switched links need.
"""

import base64
import gzip
import json
import os
import re
import shlex
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# What takes the place of files that plan_alone has for itself (its meson.build)
OWN = ["chapters/explorer/plan_module.cpp",
       "chapters/common/models/no_book.cpp",
       "comm/processes/no_processes.cpp", "core/kernels/cpu/no_cpu.cpp",
       "sim/internal/fiber_none.cpp"]
# Headers alone; /usr/include itself has another C library
HEADERS = ["CLI", "fmt", "nlohmann", "xtensor", "xtl"]
# emscripten's own -Os inlines nothing, which is five times as slow
COMPILE = ["-Os", "-finline-functions", "-DNDEBUG", "-fno-math-errno",
           "-ffp-contract=off", "-DFMT_HEADER_ONLY"]
# Larger functions where the time goes: by an object's name
OFTEN = re.compile(r"_(core|comm|sim|12_sequence_parallel)_lib")
INLINED = {True: 75, False: 12}
# An undefined symbol is an error
LINK = ["-O2", "-sMODULARIZE", "-sALLOW_MEMORY_GROWTH", "-sTOTAL_STACK=4MB"]
PLANNER = ["-sFORCE_FILESYSTEM", "-sENVIRONMENT=worker,node",
           "-sEXPORTED_FUNCTIONS=_shardbook_plan,_shardbook_answer",
           "-sEXPORTED_RUNTIME_METHODS=ccall,FS"]
# Of the page: scripts of report.html, and its own
SHARED = ["page.js", "scatter.js", "timeline_data.js", "timeline.js", "zoom.js"]
OWN_SCRIPTS = ["elements.js", "planner.js", "parts.js", "lanes.js", "plans.js",
               "megatron.js", "answer.js", "explorer.js"]


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text):
    """Leaves a file alone that has this text: nothing is built again."""
    if not os.path.exists(path) or read(path) != text:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def sources_of(build):
    """The sources that plan_alone's libraries give it, with their options."""
    link = subprocess.run(
        ["ninja", "-C", build, "-t", "commands", "-s",
         "chapters/planner/plan_alone"],
        stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
    commands = {each["output"]: each for each in
                json.loads(read(os.path.join(build, "compile_commands.json")))}
    for word in shlex.split(link):
        if word.endswith(".o") and "/plan_alone.p/" not in word:
            options = [option if option.startswith("-std=") else
                       "-I" + os.path.join(build, option[2:])
                       for option in shlex.split(commands[word]["command"])
                       if re.match("-std=|-I(?!/usr|.*precompiled)", option)]
            yield os.path.join(build, commands[word]["file"]), options


def own_sources(names):
    return [(os.path.join(ROOT, name), ["-std=c++20", "-I" + ROOT])
            for name in names]


def planner(build):
    """Of the module: sources with their options, more options, those of its link."""
    return ([*sources_of(build), *own_sources(OWN)], ["-fwasm-exceptions"],
            PLANNER)


def inlining(name):
    most = INLINED[bool(OFTEN.search(name))]
    return ["-mllvm", f"-inline-threshold={most}",
            "-mllvm", f"-inlinehint-threshold={most}"]


def build_modules(compiler, build, folder, modules):
    """Compiles the modules into the folder, with Ninja."""
    headers = os.path.join(folder, "headers")
    os.makedirs(headers, exist_ok=True)
    for name in HEADERS:
        if not os.path.lexists(os.path.join(headers, name)):
            os.symlink(os.path.join("/usr/include", name),
                       os.path.join(headers, name))
    lines = ["rule compile", "  command = $line", "  depfile = $out.d",
             "  deps = gcc", "rule link", "  command = $line"]

    def add(rule, output, inputs, command):
        lines.extend([f"build {output}: {rule} {' '.join(inputs)}",
                      "  line = " + " ".join(map(shlex.quote, command))])

    for module, (sources, options, link) in modules.items():
        objects = []
        for source, includes in sources:
            name = os.path.relpath(source, os.path.dirname(build))
            objects.append(os.path.join(module, name.replace(os.sep, "_") + ".o"))
            add("compile", objects[-1], [source],
                [compiler, *COMPILE, *inlining(objects[-1]), *options,
                 *includes, "-isystem", headers,
                 "-MD", "-MF", objects[-1] + ".d", "-c", source,
                 "-o", objects[-1]])
        add("link", f"{module}.js | {module}.wasm", objects,
            [compiler, *LINK, *options, *link, "-sEXPORT_NAME="
             + module.replace("-", "_"), *objects, "-o", module + ".js"])
    write(os.path.join(folder, "build.ninja"), "\n".join(lines) + "\n")
    # Debian's emscripten calls node, which may be another one than Debian's
    subprocess.run(["ninja", "-C", folder, "--quiet"], check=True,
                   env={**os.environ, "NODE_PATH": "/usr/share/nodejs"})


def packed(path):
    """A file by gzip and base64, which a page unpacks."""
    with open(path, "rb") as file:
        return base64.b64encode(gzip.compress(file.read(), mtime=0)).decode("ascii")


def models():
    """Sizes of the models that have names, as a config.json has them."""
    folder = os.path.join(ROOT, "chapters", "common", "models")
    llamas = re.findall(r'\{"([\w.-]+)", R"\((.*?)\)"\}',
                        read(os.path.join(folder, "llama_config.cpp")), re.S)
    gpts = re.findall(r'\{"([\w.-]+)", \{"gpt2", ([\d, ]+)\}\}',
                      read(os.path.join(folder, "model_config.cpp")))
    keys = ["vocab_size", "n_positions", "n_embd", "n_layer", "n_head"]
    return {**{name: json.loads(text) for name, text in llamas},
            **{name: {"model_type": "gpt2",
                      **dict(zip(keys, map(int, sizes.split(","))))}
               for name, sizes in gpts}}


def words_of(folder):
    """The words of each language."""
    return {language: json.loads(read(os.path.join(folder, name)))
            for language, name in (("en", "words.json"),
                                   ("zh-CN", "words.zh-CN.json"))}


def page(folder):
    """The page, with all that it needs inside. It begins in English."""
    table = os.path.join(ROOT, "chapters", "table")
    words = words_of(HERE)

    def joined(folder, names):
        return "".join(read(os.path.join(folder, name)) for name in names)
    parts = {
        **{key: f'<span data-say="{key}">{text}</span>'
           for key, text in words["en"].items()},
        "title": words["en"]["title"],
        "words": json.dumps(words, ensure_ascii=False),
        "plan-wasm": packed(os.path.join(folder, "plan.wasm")),
        "models": json.dumps(models()),
        "style": read(os.path.join(table, "report.css"))
                 + read(os.path.join(HERE, "explorer.css")),
        "worker": read(os.path.join(folder, "plan.js"))
                  + read(os.path.join(HERE, "worker.js")),
        # The report's names, such as `seconds`, are not those of this page
        "script": joined(table, SHARED) + "{\n" + joined(HERE, OWN_SCRIPTS)
                  + "}\n",
    }
    return re.sub(r"\{\{([\w-]+)\}\}", lambda found: parts[found[1]],
                  read(os.path.join(HERE, "explorer.html")))


def main(compiler, build, folder):
    build_modules(compiler, build, folder, {"plan": planner(build)})
    write(os.path.join(folder, "index.html"), page(folder))


if __name__ == "__main__":
    main(sys.argv[1], *map(os.path.abspath, sys.argv[2:]))
