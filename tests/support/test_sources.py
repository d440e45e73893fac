"""Whether the sources have a test that a pattern may match, asked before a build.

The sources have the whole names of TEST and TEST_F. TEST_P and typed tests get a
prefix and a suffix as the program runs. These consist of numbers and of words:
strings in files that instantiate tests or name their worlds or cases (*_worlds,
*_cases), names in tables of cases (*_loops.json), and names of clusters, tables,
chapters, figures and element types. A pattern with other words matches nothing.
filters_test.py asks all programs that are built whether any name of theirs would
be refused.
"""

import fnmatch
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]

TEST = re.compile(r"\b(TEST|TEST_F|TEST_P|TYPED_TEST|TYPED_TEST_P)\("
                  r"\s*(\w+),\s*(\w+)\s*\)")
PREFIX = re.compile(r"\bINSTANTIATE_T\w+\((?:\s|\\)*(\w+),")
STRING = re.compile(r'"([\w.-]+)"')
PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
ELEMENT_TYPES = "f64 f32 bf16 f16 i64 i32"


def squeezed(word):
    return re.sub(r"[^a-z0-9]", "", word.lower())


@functools.cache
def tests_of_sources():
    """Names that are complete, names that get more, and the words of that."""
    complete, partial = set(), set()
    words = {path.stem for pattern in ("sim/clusters/*", "chapters/[0-9]*",
                                       "bench/validate/*.csv")
             for path in ROOT.glob(pattern)}
    words.update(part for room in ("chapters", "comm")
                 for path in (ROOT / room).rglob("*.svg")
                 for part in path.relative_to(ROOT).parts)
    words.update(ELEMENT_TYPES.split())
    for path in (ROOT / "tests").rglob("*_loops.json"):
        words.update(re.findall(r'"name": "(\w+)"', path.read_text("utf-8")))
    for path in (ROOT / "tests").rglob("*"):
        if path.suffix not in (".cpp", ".h", ".cu"):
            continue
        text = path.read_text("utf-8")
        for macro, suite, case in TEST.findall(text):
            known = macro in ("TEST", "TEST_F")
            (complete if known else partial).add(f"{suite}.{case}")
        prefixes = PREFIX.findall(text)
        if prefixes or path.stem.endswith(("_worlds", "_cases")):
            words.update(prefixes, STRING.findall(text))
    return complete, partial, " ".join(map(squeezed, words))


@functools.cache
def is_of_words(part):
    words = tests_of_sources()[2]
    return all(piece.lower() in words for piece in PIECE.findall(part))


def may_match(pattern):
    """Whether a test may match a filter as GoogleTest reads it."""
    wanted = pattern.partition("-")[0] or "*"
    return any(_may_match_one(glob) for glob in wanted.split(":"))


def _may_match_one(glob):
    complete, partial, _ = tests_of_sources()
    texts = re.split(r"[*?]", glob)
    if glob in complete or (len(texts) > 1 and fnmatch.filter(
            complete, glob.replace("[", "[[]"))):
        return True
    parts = [part for text in texts for part in re.split(r"[/.]", text)]
    return any(all(part in name or is_of_words(part) for part in parts)
               for name in partial)
