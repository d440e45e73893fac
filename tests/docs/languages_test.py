#!/usr/bin/env python3
"""Compares the Chinese pages with the English ones.

    python3 tests/docs/languages_test.py            all pages, and the test itself
    python3 tests/docs/languages_test.py PAGE...    these, named in either language
    python3 tests/docs/languages_test.py --mend PAGE...
        writes Chinese anchors and figures for English ones, and spaces before
        formulas
    python3 tests/docs/languages_test.py --switch [PAGE...]
        writes the line under each title that leads to the other language

Both pages have the same blocks in the same order (headings, paragraphs, items,
tables and their columns, images, folded parts), code and formulas byte for byte,
and the same links, numbers and units; figures are those with Chinese words. A
number may be a digit here and a word there. What only a reader can judge, the
test leaves to readers.
"""

import json
import pathlib
import re
import sys
import unittest
from collections import Counter

sys.dont_write_bytecode = True

from languages import (  # noqa: E402
    CODE, FORMULA, HAN, IMAGE, LINK, SCALES, SWITCH, anchors_of, blocks_of, chinese_words,
    english_words, numbers_of, words_of)

PAGES = ["README.md", *(f"chapters/{name}.md" for name in (
    "README", "before", "comparing", "from_pytorch", "running", "symbols",
    "what_goes_wrong", "on_your_system", "06_1f1b/pipedream",
    "15_engine/accelerate"))]
IN_CHINESE_ALONE = ["chapters/tutorials.zh-CN.md"]
CHAPTERS = "chapters/[0-9][0-9]_*/README.md"
GLOSSARY = "\n## 术语\n"  # ends the Chinese root page

# Words that the Chinese pages use another word for
TERMS = [
    (r"(?<!主机)内存", "a GPU has 显存, a host has 主机内存"),
    (r"标尺", "a yardstick is 基准"), (r"声明", "a claim is 结论"),
    (r"笔记本(?!电脑)", "a notebook is notebook"),
    (r"掉队者", "a straggler is 慢节点（straggler）"),
    (r"世界", "worlds are 运行环境; a group is world"),
    (r"批次|微批", "a batch is batch, a micro-batch micro-batch"),
    (r"检查点", "a checkpoint is checkpoint"), (r"梯度累加", "梯度累积"),
    (r"[「」『』]", "quotes are “ and ”")]
# What keeps a page from being set well
SIGNS = [
    (rf"[{HAN}][,;:?!]", "Chinese has punctuation of its full width"),
    (rf"[{HAN}][A-Za-z0-9`$]|[A-Za-z0-9`$][{HAN}]",
     "a space between Chinese and Latin")]
# GitHub sees no formula there
NO_FORMULA = re.compile(r"([，。：；、？！（）“”])(?=\$)")



def chinese(page):
    return page.with_name(page.stem.removesuffix(".zh-CN") + ".zh-CN.md")


def english(page):
    return page.with_name(page.name.replace(".zh-CN.md", ".md"))


def root_of(page):
    return next(folder for folder in page.resolve().parents
                if (folder / "shardbook").is_file())


def pages_of(root):
    return [*(root / page for page in PAGES), *sorted(root.glob(CHAPTERS))]


# ---- What differs

def number_faults(here, there):
    (numbers, units, names), (theirs, their_units, their_names) = (
        numbers_of(here.prose), numbers_of(there.prose))
    lost = numbers - theirs - chinese_words(there.prose)
    new = theirs - numbers - english_words(here.prose)
    for scale in "thousand", "million", "billion":  # 1.3, 13 and 70 billion
        for number in lost if scale in here.prose else ():
            scaled = f"{float(number) * SCALES[scale]:.10g}"
            both = min(lost[number], new[scaled])
            lost[number] -= both
            new[scaled] -= both
    for word, counter in (("lacks", +lost), ("has other or more", +new)):
        if counter:
            yield f"{word} numbers: " + ", ".join(sorted(counter.elements()))
    if units - their_units:
        yield "lacks units: " + ", ".join(sorted(map(" ".join, units - their_units)))
    if names - their_names:
        yield "lacks " + ", ".join(sorted(names - their_names))
    stems = {name.rstrip("0123456789.") for name in names}
    other = {name for name in their_names - names
             if name.rstrip("0123456789.") not in stems}
    if other:
        yield "has, but the English page has not, " + ", ".join(sorted(other))


# ---- Links

def split_target(page, target):
    path, _, anchor = target.partition("#")
    return ((page.parent / path).resolve() if path else page.resolve()), anchor


def is_local(target):
    return not re.match(r"[a-z][a-z+.-]*:|//|\.\./\.\./actions/", target)


def link_key(page, target, translated):
    """A link as both languages have it: the English page, the number of the heading."""
    if not is_local(target):
        return target, None
    path, anchor = split_target(page, target)
    original = english(path)
    if original in translated and not chinese(original).exists():
        anchor = ""  # of headings that are still to come
    if anchor and path.exists():
        anchors = anchors_of(path)
        anchor = anchors.index(anchor) if anchor in anchors else anchor
    return str(original), anchor


def link_faults(page, here, there, translated):
    alone = {english(root_of(page) / path) for path in IN_CHINESE_ALONE}
    keys = [Counter(key for _, target, _ in words.links
                    for key in [link_key(path, target, translated)]
                    if pathlib.Path(key[0]) not in alone)
            for path, words in ((english(page), here), (page, there))]
    for word, counter in (("lacks", keys[0] - keys[1]), ("has", keys[1] - keys[0])):
        for (path, anchor), _ in sorted(counter.items(), key=str):
            place = f", heading {anchor}" if isinstance(anchor, int) else f"#{anchor}"
            yield f"{word} a link to {path}{place if anchor not in ('', None) else ''}"
    yield from target_faults(page, there, translated)


def target_faults(page, there, translated):
    is_first = True
    for text, target, rest in there.links:
        if not is_local(target):
            continue
        path, anchor = split_target(page, target)
        if path in translated:
            yield f"{target}: there is {chinese(path).name}"
        elif path.suffix in (".md", ".ipynb") and english(path) == path:
            if is_first and "（英文）" not in text + rest:
                yield f"{target}: the first page in English, without （英文）"
            is_first = False
        if not path.exists():
            if english(path) not in translated:
                yield f"{target} is not there"
        elif anchor and path.suffix == ".md":
            if anchor not in anchors_of(path):
                yield (f"{target}: no such anchor" + (
                    ", but the English page has it: --mend"
                    if anchor in anchors_of(english(path)) else ""))


# ---- Two pages

def structure_faults(here, there):
    for mine, theirs in zip(here, there):
        if mine.kind != theirs.kind:
            yield (f"line {theirs.line} is {theirs.kind}, but line {mine.line} of the "
                   f"English page {mine.kind}: {mine.text[:60]}")
            return
        if mine.kind == "```" and mine.text != theirs.text:
            yield f"line {theirs.line}: other code than line {mine.line}"
    if len(here) != len(there):
        longer = max(here, there, key=len)[min(len(here), len(there))]
        yield f"one page ends before the other's line {longer.line}: {longer.text[:60]}"


def chinese_figure(image):
    """Of a figure; other images have no words, or are the same."""
    is_figure = is_local(image) and not image.endswith(".zh-CN.svg")
    return re.sub(r"\.svg$", ".zh-CN.svg", image) if is_figure else image


def word_faults(here, there):
    for name, mine, theirs in (
            ("displays", here.displays, there.displays),
            ("images", [*map(chinese_figure, here.images)], there.images)):
        if mine != theirs:
            first = next((f"{b} for {a}" for a, b in zip(mine, theirs) if a != b),
                         "their number")
            yield f"other {name}: {first}"
    for name, longest in (("code", 0), ("formulas", 12)):
        # Chinese may repeat a name or a letter where English has a pronoun
        mine, theirs = getattr(here, name), getattr(there, name)
        if name == "formulas":
            lost = Counter({f: n for f, n in (mine - theirs).items()
                            if len(f) > longest or f not in theirs})
            new = Counter({f: n for f, n in (theirs - mine).items()
                           if len(f) > longest or f not in mine})
        else:
            lost, new = set(mine) - set(theirs), set(theirs) - set(mine)
        for word, some in (("lacks", lost), ("has other", new)):
            if some:
                yield f"{word} {name}: " + ", ".join(sorted(some))
    for alt in there.alts:
        if alt and not re.search(f"[{HAN}]", alt):
            yield f"an image's text is not Chinese: {alt}"


def lost_marks(text):
    """Marks of emphasis with a sign inside and a letter outside: CommonMark ignores
    them. Odd ones open, even ones close."""
    for k, mark in enumerate(re.finditer(r"\*{1,2}", text)):
        sides = [text[mark.start() - 1:mark.start()], text[mark.end():mark.end() + 1]]
        outside, inside = sides if k % 2 == 0 else sides[::-1]
        if inside.isspace() or not inside.isalnum() and outside.isalnum():
            yield text[max(0, mark.start() - 9):mark.end() + 9]


def term_faults(blocks, here, there):
    for block in blocks:
        if block.kind == "```":
            continue
        for around in lost_marks(FORMULA.sub("$", CODE.sub("`", block.text))):
            yield f"line {block.line}: Markdown reads no emphasis in {around}"
        text = CODE.sub("`", block.text)
        for formula in FORMULA.finditer(text):
            before = text[max(0, formula.start() - 2):formula.start()]
            if before == "**" or NO_FORMULA.search(before + "$"):
                yield f"line {block.line}: a space before {formula[0]}: --mend"
        prose = re.sub(r"\*", "", words_of([block]).prose)
        for pattern, say in TERMS + SIGNS:
            found = re.search(pattern, prose)
            if found:
                around = prose[max(0, found.start() - 8):found.end() + 8]
                yield f"line {block.line}: {around!r}: {say}"
    courses = len(re.findall(r"\bcourse|curricul", here.prose, re.IGNORECASE))
    if there.prose.count("课程") > courses:
        yield f"课程 is a course ({courses} on the English page), a lesson is 单屏代码"


def switch_line(page):
    if page == english(page):
        return f"English | [简体中文]({chinese(page).name})"
    return f"[English]({english(page).name}) | 简体中文"


def has_switch(page):
    lines = page.read_text("utf-8").splitlines()
    return lines[0].startswith("# ") and lines[2:3] == [switch_line(page)]


def compare(page, texts, translated):
    """What is wrong with a Chinese page, beside the English one."""
    both = [blocks_of(SWITCH.sub(lambda line: "\n" * line[0].count("\n"), text, 1))
            for text in texts]
    here, there = map(words_of, both)
    yield from structure_faults(*both)
    yield from word_faults(here, there)
    yield from number_faults(here, there)
    yield from link_faults(page, here, there, translated)
    yield from term_faults(both[1], here, there)


def faults_alone(page):
    """What is wrong with a page that has no English counterpart."""
    blocks = blocks_of(page.read_text("utf-8"))
    words = words_of(blocks)
    translated = {path.resolve() for path in pages_of(root_of(page))}
    yield from target_faults(page, words, translated)
    yield from term_faults(blocks, words_of([]), words)
    # English pages have them, where tests run them
    known = " ".join(re.sub(r"\s*\\\n\s*", " ", path.read_text("utf-8"))
                     for path in root_of(page).glob("chapters/**/*.md")
                     if english(path) == path)
    for code in words.code:
        if (code.startswith("./shardbook ")
                and not re.search(re.escape(code) + r"(?![\w-])", known)):
            yield f"no English page shows {code}"


def faults_of(page):
    original, page = english(page), chinese(page)
    root = root_of(page)
    translated = {path.resolve() for path in pages_of(root)}
    if not page.exists():
        yield "is not there"
        return
    if not has_switch(page):
        yield f"its third line is not {switch_line(page)}"
    texts = [path.read_text("utf-8") for path in (original, page)]
    if page.parent == root:
        texts[1] = texts[1].split(GLOSSARY)[0] + "\n"
    yield from compare(page, texts, translated)


def add_switch(page):
    text = page.read_text("utf-8")
    title, rest = SWITCH.sub("", text, 1).split("\n", 1)
    new = f"{title}\n\n{switch_line(page)}\n\n{rest.lstrip()}"
    if new != text:
        page.write_text(new, "utf-8")


def mend(page):
    """English anchors and figures of Chinese pages become Chinese ones."""
    def drawn(image):
        file = image[2] or image[3]
        return image[0].replace(file, chinese_figure(file))

    def anchored(link):
        target = link[2]
        path, anchor = split_target(page, target)
        if not (anchor and is_local(target) and path.exists() and path != english(path)):
            return link[0]
        names = [anchors_of(english(path)), anchors_of(path)]
        if anchor in names[1] or anchor not in names[0]:
            return link[0]
        at = names[0].index(anchor)
        return link[0].replace("#" + anchor, "#" + names[1][at])

    blocks = [IMAGE.sub(drawn, LINK.sub(anchored, NO_FORMULA.sub(r"\1 ", part)))
              if k % 2 == 0 else part
              for k, part in enumerate(re.split(r"(^```.*?^```$)",
                                                page.read_text("utf-8"),
                                                flags=re.MULTILINE | re.DOTALL))]
    page.write_text("".join(blocks), "utf-8")


# ---- The test

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Languages(unittest.TestCase):
    def test_each_page_has_its_counterpart(self):
        here = {str(page.relative_to(ROOT)) for page in pages_of(ROOT)
                if not chinese(page).exists()}
        self.assertEqual(here, set())
        others = {english(page) for page in ROOT.rglob("*.zh-CN.md")
                  if "build" not in page.relative_to(ROOT).parts[0]}
        alone = {english(ROOT / page) for page in IN_CHINESE_ALONE}
        self.assertEqual(others - set(pages_of(ROOT)), alone)

    def test_each_page_has_the_switch(self):
        for page in pages_of(ROOT):
            self.assertTrue(has_switch(page), f"{page}: --switch")

    def test_pages_agree(self):
        self.maxDiff = None
        for page in pages_of(ROOT):
            if chinese(page).exists():
                with self.subTest(page=str(chinese(page).relative_to(ROOT))):
                    self.assertEqual(list(faults_of(page)), [])

    def test_pages_in_chinese_alone(self):
        for page in IN_CHINESE_ALONE:
            self.assertEqual(list(faults_alone(ROOT / page)), [])

    def test_terms_of_the_glossary_are_used(self):
        here, there = ("\n".join(page.read_text("utf-8").split(GLOSSARY)[0]
                                 for page in pages if page.exists()).lower()
                       for pages in (pages_of(ROOT), map(chinese, pages_of(ROOT))))
        glossary = chinese(ROOT / "README.md").read_text("utf-8").split(GLOSSARY)[1]
        rows = [row.strip("| ").split(" | ")
                for row in glossary.split("|---|\n")[1].splitlines()]
        self.assertGreater(len(rows), 30)
        self.assertEqual(len({row[0] for row in rows}), len(rows))
        for term, translated, sentence in rows:
            self.assertTrue(sentence.endswith("。"), sentence)
            self.assertTrue(term.lower() in here, term)
            for word in re.split("（|）$", translated):
                self.assertTrue(word.lower() in there, word)

    def test_tables_of_words_have_the_same_keys_and_places(self):
        tables = [path for path in (ROOT / "chapters").rglob("words.zh-CN.json")]
        self.assertEqual(len(tables), 3)
        for path in tables:
            there = json.loads(path.read_text("utf-8"))
            if "texts" in there:  # from the English text itself
                there = there["texts"]
                here = {key: key for key in there}
            else:
                here = json.loads(path.with_name("words.json").read_text("utf-8"))
            self.assertEqual([*here], [*there])
            for key, text in there.items():
                with self.subTest(path=path, key=key):
                    # {name}; or numbers, {} in order or {1} by place, each once
                    names = [re.findall(r"\{\d*(\w*)\}", each)
                             for each in (here[key], text)]
                    self.assertEqual(*map(sorted, names))
                    places = re.findall(r"\{\d+\}", text)
                    self.assertEqual(len(set(places)), len(places))
                    if len(re.sub(r"\{\w*\}", "", here[key]).split()) > 2:
                        self.assertRegex(text, f"[{HAN}]")
                    filled = re.sub(r"\{\d*\}", "1", text)
                    for pattern, say in TERMS + SIGNS:
                        self.assertNotRegex(filled, pattern, say)

    def test_faults_are_named(self):
        page = ROOT / "README.md"
        text = ("# A\n\nTwo of 8 ranks send 1.5 million times 4 GB to `x`.\n\n"
                "| a | b |\n|---|---|\n| $P$ | [c](LICENSE) |\n\n```\ncode\n```\n\n"
                "![What one sees](a.svg)\n")
        good = ("# 甲\n\n八个 rank 之中，2 个向 `x` 发送 150 万次 4 GB。\n\n| 甲 | 乙 |\n|---|---|\n"
                "| $P$ | [丙](LICENSE) |\n\n```\ncode\n```\n\n![看到什么](a.zh-CN.svg)\n")
        for old, new in (("", ""), ("# 甲", "## 甲"), ("150 万", "15 万"), ("4 GB", "4 MB"),
                         ("2 个", "3 个"), ("| 乙 |", "|"), ("`x`", "`y`"), ("$P$", "$Q$"),
                         ("code", "Code"), ("LICENSE", "README.md"), ("a.zh", "b.zh"), (".zh-CN", ""),
                         ("看到什么", "seen"), ("rank 之中", "rank之中"), ("发送", "内存"),
                         ("八个 rank 之中", "**八个。**甲 rank 之中"), ("八个 ", ""),
                         ("| $P$", "|，$P$"), ("\n\n![", "\n\n更多。\n\n!["), ("，", ",")):
            with self.subTest(old=old, new=new):
                faults = list(compare(chinese(page), [text, good.replace(old, new)],
                                      set()))
                self.assertEqual(bool(faults), bool(old), faults)

    def test_wrong_links_are_named(self):
        page = ROOT / "chapters" / "README.md"
        texts = [path.read_text("utf-8") for path in (page, chinese(page))]
        for old, new in (("before.zh-CN.md", "before.md"), ("（英文）", ""),
                         ("#gpt-的一个块", "#one-block-of-a-gpt"), ("#规则", "#总图"),
                         ("../sim/cluster.h", "../sim/clusters.h"),
                         ("#virtual-time", "#a-llama")):
            with self.subTest(new=new):
                self.assertIn(old, texts[1])
                wrong = [texts[0], texts[1].replace(old, new, 1)]
                self.assertTrue(list(compare(chinese(page), wrong, set(pages_of(ROOT)))))


def main(arguments):
    pages = [pathlib.Path(page).resolve() for page in arguments
             if not page.startswith("--")]
    options = [option for option in arguments if option.startswith("--")]
    if "--switch" in options:
        for page in pages or pages_of(ROOT):
            for path in (english(page), chinese(page)):
                if path.exists():
                    add_switch(path)
        return 0
    if "--mend" in options:
        for page in pages:
            mend(chinese(page))
    elif not pages:
        return not unittest.main(argv=sys.argv[:1] + options, exit=False
                                 ).result.wasSuccessful()
    is_wrong = False
    for page in pages:
        for fault in faults_of(page):
            is_wrong = True
            print(f"{chinese(page).relative_to(root_of(page))}: {fault}")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
