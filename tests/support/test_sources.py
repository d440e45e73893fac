"""Whether the sources have a test that a pattern may match, asked before a build.

The sources have the whole names of TEST and TEST_F. TEST_P and typed tests get a
prefix and a suffix as the program runs. These consist of numbers and of words:
strings in files that instantiate tests or name their worlds or cases (*_worlds,
*_cases), names in tables of cases (*_loops.json, strategies.txt), names of element types; and,
where a source looks into folders, names of clusters, tables, chapters and
figures. A pattern with other words matches nothing. filters_test.py asks all
programs that are built whether any name of theirs would be refused.
"""

import collections
import fnmatch
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]

TEST = re.compile(r"\b(TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\("
                  r"\s*(\w+),\s*(\w+)\s*\)")
INSTANTIATE = re.compile(
    r"\bINSTANTIATE_T\w+\((?:\s|\\)*(\w+),(?:\s|\\)*(\w+),")
STRING = re.compile(r'"([\w.-]+)"')
PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
ELEMENT_TYPES = "f64 f32 bf16 f16 i64 i32"


INCLUDE = re.compile(r'^#include ["<](?:\S*/)?(tests/\S+)[">]', re.M)
FOLDERS = re.compile(r"directory_iterator|names_in\(|programs\(")


def squeezed(word):
    return re.sub(r"[^a-z0-9]", "", word.lower())


def words_of_folders():
    words = {path.stem for pattern in ("sim/clusters/*", "chapters/[0-9]*",
                                       "bench/validate/*.csv")
             for path in ROOT.glob(pattern)}
    words.update(part for room in ("chapters", "comm")
                 for path in (ROOT / room).rglob("*.svg")
                 for part in path.relative_to(ROOT).parts)
    return words


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
def tests_of_sources(paths=None):
    """Names that are complete, names that get more, and the words that those of
    each suite get; of all sources, or of those given."""
    complete, partial = set(), set()
    for_all, words = set(ELEMENT_TYPES.split()), collections.defaultdict(set)
    if paths is None:
        paths = [path for path in (ROOT / "tests").rglob("*")
                 if path.suffix in (".cpp", ".h", ".cu")]
    for path in paths:
        text = text_of(path)
        for macro, suite, case in TEST.findall(text):
            known = macro in ("TEST", "TEST_F")
            (complete if known else partial).add(f"{suite}.{case}")
        own = set(STRING.findall(text))
        if path.stem.endswith(("_worlds", "_cases")):
            for_all |= own
        if "_loops.json" in text:
            for table in (ROOT / "tests").rglob("*_loops.json"):
                own.update(re.findall(r'"name": "(\w+)"', text_of(table)))
        if "strategies.txt" in text:
            own.update(re.findall(r"\w+", text_of(ROOT / "tests/golden/strategies.txt")))
        if FOLDERS.search(text):
            own |= words_of_folders()
        for prefix, suite in INSTANTIATE.findall(text):
            words[suite] |= own | {prefix}
    suites = {name.partition(".")[0] for name in partial}
    # The others are parameters of macros
    for_all.update(*(words[suite] for suite in words.keys() - suites))
    return complete, partial, {
        suite: " ".join(map(squeezed, for_all | words[suite]))
        for suite in suites}


@functools.cache
def is_of_words(part, words):
    return all(piece.lower() in words for piece in PIECE.findall(part))


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
