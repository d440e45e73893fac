"""Whether the sources have a test that a pattern may match, asked before a build.

The sources have the whole names of TEST and TEST_F. TEST_P and typed tests get a
prefix and a suffix as the program runs. These consist of numbers and of words:
strings in what instantiates the tests, in the tables and functions that it
names, and in what these name; names of element types; names in files of cases
(*_loops.json, strategies.txt) and in folders that these sources read. A pattern
with other words matches nothing. filters_test.py asks all programs that are
built whether any name of theirs would be refused.
"""

import collections
import fnmatch
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]

TEST = re.compile(r"\b(TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\("
                  r"\s*(\w+),\s*(\w+)\s*\)")
TESTS = re.compile(r"TEST|TYPED_TEST|INSTANTIATE_T|class \w+ : public .*TestWithParam")
INSTANTIATE = re.compile(
    r"\bINSTANTIATE_T\w+\((?:\s|\\)*(\w*),(?:\s|\\)*(\w+),")
STRING = re.compile(r'"([\w.-]+)"')
# The first of a row, which is its name
FIRST_STRING = re.compile(r'[({]\s*"([\w.-]+)"')
PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
ELEMENT_TYPES = "f64 f32 bf16 f16 i64 i32"
INCLUDE = re.compile(r'^#include ["<](?:\S*/)?(tests/\S+)[">]', re.M)
# What stands between two empty lines, and the name that it gives something
BLOCK = re.compile(r"\n\n(?=[^\s}])")
NAME = re.compile(r"(?:#define|struct|class|enum) +(\w+)|(\w+)\s*(?:\[\w*\]\s*)?[({=;]")
# Sources that read one of these, and what it holds
FOLDERS = {
    'names_in("clusters")': ["sim/clusters/*"],
    "programs(": ["chapters/[0-9]*"],
    "all_figures(": ["chapters/**/*.svg", "comm/**/*.svg"],
}
TABLES = {"_loops.json": ("tests/**/*_loops.json", r'"name": "(\w+)"'),
          "strategies.txt": ("tests/golden/strategies.txt", r"\w+")}


@functools.cache
def text_of(path):
    return path.read_text("utf-8")


def with_headers(paths):
    """The sources, and the headers below tests/ that they include."""
    found, new = set(), set(paths)
    while new:
        found |= new
        new = {ROOT / name for path in new for name in INCLUDE.findall(text_of(path))
               if (ROOT / name).is_file()} - found
    return frozenset(found)


@functools.cache
def blocks_of(paths):
    """Texts by the name that they define, not only declare; without the tests."""
    blocks = collections.defaultdict(set)
    for path in paths:
        for text in BLOCK.split(text_of(path)):
            code = re.sub(r"^(//.*|namespace .*)\n", "", text, flags=re.M).lstrip()
            name = NAME.search(code)
            if name and re.search("[{=\\\\]", code) and not TESTS.match(code):
                blocks[name[1] or name[2]].add(text)
    return blocks


def arguments_at(text, start):
    """Those of the call that begins there."""
    depth, begin, arguments = 0, start, []
    for mark in re.finditer("[][(){},]", text[start:]):
        depth += (mark[0] in "([{") - (mark[0] in ")]}")
        if depth == (mark[0] == ","):
            arguments.append(text[begin:start + mark.start()])
            begin = start + mark.end()
        if not depth:
            break
    return arguments


def reached(text, scopes):
    """A text and all that it names, in the first scope that has the name."""
    found, new = set(), {text}
    while new:
        found |= new
        names = {name for text in new for name in re.findall(r"\w+", text)}
        new = {text for name in names for text in next(
            (scope[name] for scope in scopes if name in scope), ())} - found
    return found


@functools.cache
def words_in(text, strings):
    """Parts of tests' names in a source's text, or in what it reads."""
    words = set(strings.findall(text))
    for reads, (table, part) in TABLES.items():
        if reads in text:
            for path in ROOT.glob(table):
                words.update(re.findall(part, text_of(path)))
    for reads, patterns in FOLDERS.items():
        if reads in text:
            words.update(part for pattern in patterns
                         for path in ROOT.glob(pattern)
                         for part in path.relative_to(ROOT).parts)
    return words


@functools.cache
def tests_of_sources(paths=None):
    """Names that are complete, names that get more, and the words that those of
    each suite get; of all sources, or of those given."""
    complete, partial = set(), set()
    for_all, words = set(ELEMENT_TYPES.split()), collections.defaultdict(set)
    if paths is None:
        paths = [path for path in (ROOT / "tests").rglob("*")
                 if path.suffix in (".cpp", ".h", ".cu")]
    blocks = blocks_of(frozenset(paths))
    for path in paths:
        text = text_of(path)
        for macro, suite, case in TEST.findall(text):
            known = macro in ("TEST", "TEST_F")
            (complete if known else partial).add(f"{suite}.{case}")
        near = blocks_of(with_headers([path]))
        for call in INSTANTIATE.finditer(text):
            words[call[2]].add(call[1])
            values, *name = arguments_at(text, call.start())[2:]
            if not name:
                continue   # numbers
            strings = FIRST_STRING if "param.name;" in name[0] else STRING
            for part in reached(values + name[0], [near, blocks]):
                words[call[2]] |= words_in(part, strings)
    suites = {name.partition(".")[0] for name in partial}
    # The others are parameters of macros
    for_all.update(*(words[suite] for suite in words.keys() - suites))
    return complete, partial, {
        suite: re.sub("[^A-Za-z0-9 ]", "", " ".join(for_all | words[suite]))
        for suite in suites}


@functools.cache
def is_of_words(part, words):
    """Words with small letters may get large ones in names."""
    return all(piece in words or
               piece != piece.lower() and piece.lower() in words.lower()
               for piece in PIECE.findall(part))


def may_match(pattern, paths=None):
    """Whether a test (of these sources) may match a filter as GoogleTest reads
    it."""
    wanted = pattern.partition("-")[0] or "*"
    return any(_may_match_one(glob, paths) for glob in wanted.split(":"))


def _may_match_one(glob, paths):
    complete, partial, words = tests_of_sources(paths)
    texts = re.split(r"[*?]", glob)
    if glob in complete or (len(texts) > 1 and fnmatch.filter(
            complete, glob.replace("[", "[[]"))):
        return True
    parts = [part for text in texts for part in re.split(r"[/.]", text)]
    return any(all(part in name or is_of_words(part, words[name.partition(".")[0]])
                   for part in parts) for name in partial)
