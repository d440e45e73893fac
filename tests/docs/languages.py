"""Pages in blocks, and what they say: words, links, formulas, numbers.

For languages_test.py.
"""

import functools
import re
from collections import Counter
from dataclasses import dataclass, field

HAN = "\u4e00-\u9fff"
SWITCH = re.compile(r"^(?:English \| \[简体中文\]\(\S+\)|\[English\]\(\S+\)"
                    r"(?: \| 简体中文)?|\[简体中文\]\(\S+\))$\n?\n?", re.MULTILINE)
CODE = re.compile(r"(`+)(.+?)\1")
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$", re.DOTALL)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|!\[[^\]]*\])*)\]\(\s*<?([^\s)>]+)>?\)")
IMAGE = re.compile(r'!\[([^\]]*)\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"')
TAG = re.compile(r'<(?:[^<>]*? alt="([^"]*)")?[^<>]*>')
UNIT = (r"\s*(%|[KMGT]?i?B(?:/s)?\b|TFLOP/s|ms\b|µs\b|s\b|bytes?\b|字节|毫秒|微秒|秒)?")
NUMBER = re.compile(
    r"(?<![\w.-])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?:\s?"
    r"(thousand|million|billion|trillion|万亿|千亿|百亿|十亿|亿|千万|百万|十万|万|千))?"
    + UNIT)
NAME = re.compile(r"[A-Za-z][A-Za-z0-9.+-]*\d[A-Za-z0-9.+-]*|\d+(?:\.\d+)?[A-Za-z]"
                  r"[A-Za-z0-9.+-]*")
SCALES = {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12,
          "千": 1e3, "万": 1e4, "十万": 1e5, "百万": 1e6, "千万": 1e7, "亿": 1e8,
          "十亿": 1e9, "百亿": 1e10, "千亿": 1e11, "万亿": 1e12}
UNITS = {"毫秒": "ms", "微秒": "µs", "秒": "s", "bytes": "字节", "byte": "字节"}
WORDS = {word: value for value, words in {
    0: "zero none no", 1: "one once a an first single alone half third quarter",
    2: "two twice both pair pairs second half double halves", 3: "three third thirds",
    4: "four fourth quarter quarters fourths", 5: "five fifth fifths",
    6: "six sixth", 7: "seven seventh", 8: "eight eighth eighths",
    9: "nine ninth", 10: "ten tenth", 11: "eleven", 12: "twelve", 13: "thirteen",
    14: "fourteen", 15: "fifteen", 16: "sixteen sixteenth", 20: "twenty",
    30: "thirty", 40: "forty", 50: "fifty", 60: "sixty", 100: "hundred",
    1000: "thousand"}.items() for word in words.split()}


# ---- A page in blocks

@dataclass
class Block:
    kind: str
    line: int
    text: str


def kind_of(line):
    for pattern, kind in ((r"```", "```"), (r"#+ ", None), (r"\|", "|"),
                          (r"</?details", None), (r"\$\$", "$$"), (r"[-*] ", "-"),
                          (r"\d+\. ", "1."), (r"!\[|<(?:picture|img|p)\b", "image")):
        found = re.match(pattern, line.strip())
        if found:
            return kind or found[0].strip()
    return "text"


def blocks_of(text):
    blocks, is_open = [], False  # open: the next line may go on with the last block
    for number, line in enumerate(text.splitlines(), 1):
        if is_open and blocks[-1].kind == "```":
            blocks[-1].text += "\n" + line
            is_open = line.strip() != "```"
            continue
        kind = kind_of(line)
        if not line.strip():
            is_open = False
        elif is_open and kind == "text" and blocks[-1].kind in ("text", "-", "1."):
            blocks[-1].text += "\n" + line
        else:
            if kind == "|":
                kind = "|" * (1 + len(re.findall(r"(?<!\\)\|", CODE.sub("`", line))))
            blocks.append(Block(kind, number, line))
            is_open = True
    return blocks


@functools.cache
def anchors_of(page):
    """The anchors that GitHub gives to the headings of a page, in order."""
    anchors, seen = [], Counter()
    for block in blocks_of(page.read_text("utf-8")):
        if block.kind.startswith("#"):
            title = LINK.sub(r"\1", block.text.lstrip("#").strip()).lower()
            anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
            anchors.append(anchor + (f"-{seen[anchor]}" if seen[anchor] else ""))
            seen[anchor] += 1
    return anchors


@dataclass
class Words:
    """What a page says outside of its fences."""
    prose: str = ""
    code: Counter = field(default_factory=Counter)
    formulas: Counter = field(default_factory=Counter)
    displays: list = field(default_factory=list)
    links: list = field(default_factory=list)  # (text, target, what follows)
    images: list = field(default_factory=list)
    alts: list = field(default_factory=list)


def same_text(formula):
    """A formula without the words in it, which are translated."""
    return re.sub(r"\\text\{ [^}]*\}|\\text\{[^}]*[ " + HAN + r"][^}]*\}", r"\\text{}",
                  formula)


def words_of(blocks):
    text = "\n".join(block.text for block in blocks if block.kind != "```")
    found = Words()
    code = [words for _, words in CODE.findall(text)]
    found.code.update(code)
    text = CODE.sub("`", text)
    for display, inline in FORMULA.findall(text):
        if display:
            found.displays.append(same_text(display))
        else:
            found.formulas[same_text(inline)] += 1
    text = FORMULA.sub("$", text)
    for alt, file, source in IMAGE.findall(text):
        found.images.append(file or source)
        found.alts.append(alt)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found.links = [(link[1], link[2], text[link.end():link.end() + 4])
                   for link in LINK.finditer(text)]
    found.alts += [tag for tag in TAG.findall(text) if tag]
    text = TAG.sub(lambda tag: tag[1] or "", LINK.sub(r"\1", text))
    found.prose = text.replace("&nbsp;", "")
    return found


# ---- Numbers

def numbers_of(prose):
    """Numbers, those with units, and names with digits such as GPT-2."""
    prose = re.sub(r"\b[\d.]+D\b|[\d.]+ ?维", "", prose).replace("**", "")
    names = {re.sub(r"(?<=\d)s$", "", name.rstrip(".-+"))  # T4s
             for name in NAME.findall(prose)}
    numbers, units = Counter(), set()
    for number, scale, unit in NUMBER.findall(NAME.sub("", prose)):
        number = number.replace(",", "")
        if scale:
            number = f"{float(number) * SCALES[scale]:.10g}"
        numbers[number] += 1
        if unit:
            units.add((number, UNITS.get(unit, unit)))
    return numbers, units, names


def english_words(prose):
    return Counter(str(value) for word, value in WORDS.items()
                   for _ in re.findall(rf"\b{word}\b", prose, re.IGNORECASE)) + Counter(
                       {"2": len(re.findall(r"\bhalf\b", prose)),
                        "1": len(re.findall(r"\bhalf\b|th\b", prose))})


def chinese_words(prose):
    """一 to 九百九十九, and half as 1 and 2."""
    digits = dict(zip("零一二三四五六七八九", range(10)), 两=2)
    values = Counter({value: prose.count("半") for value in "12"})
    for word in re.findall("[零一二两三四五六七八九十百]+", prose):
        value, last = 0, None
        for sign in word:
            if sign in digits:
                last = digits[sign]
            else:
                value += (1 if last is None else last) * {"十": 10, "百": 100}[sign]
                last = None
        values[str(value + (last or 0))] += 1
    return values
