"""The calls of chapters/from_pytorch.md: PyTorch's beside the book's.

A row of its tables shows one call, in code that a test compiles and runs. Each
exercise begins with the rows that its solution needs.
"""

import collections
import re
import textwrap

Row = collections.namedtuple("Row", "line theirs ours note")
FUNCTION = re.compile(r"^\w[\w:<>&* ]*[ &*](\w+)(\([^{};]*\)) ?[{;]", re.M)


def rows_of(page):
    """Each row's line of the page, PyTorch's first code, the book's, and what
    the third column warns of."""
    rows = []
    for line, text in enumerate(page.splitlines(), 1):
        if cells := re.match(r"\| (.*?) \| `([^`]*)` \| ?(.*?) ?\|", text):
            theirs = re.search("`(.*?)`", cells[1])
            rows.append(Row(line, theirs[1] if theirs else "", cells[2],
                            cells[3].replace("`", "")))
    return rows


def call_of(code):
    """The call that a row shows, as its text and as a pattern of such calls."""
    declared = re.match(r"(?:const )?([A-Z]\w+) \w+[;(]", code)
    if declared:
        return declared[1], rf"\b{declared[1]} \w+[;({{]"
    call = re.search(
        r"((\w+(?:\.|->|::))?\b(?!for\b)([a-z]\w*)(?:<\w+>)?\()(.)", code)
    if not call:
        return code, r"(?!)"
    text, scope, name, argument = call.groups()
    if not scope:
        return text, rf"(?<![\w.>:])(?:shardbook::)?{name}\("
    if scope.endswith("::"):
        return text, rf"\b{scope}{name}\("
    # x.size(0) is a tensor's, dp.size() a group's, mesh.size("dp") a mesh's
    kind = {")": r"\)", '"': '"'}.get(argument, r'[^)"]')
    return text, rf"(?:\.|->){name}\({kind}"


def rows_for(strategy, rows):
    """The rows that a strategy needs, one for each of its calls."""
    code = re.sub(r"//.*", "", strategy)
    for module in re.findall(r"\bModule& (\w+)", code):
        code = re.sub(rf"\b{module}\b", "model", code)
    has_group = re.search("ProcessGroup|DeviceMesh", code)
    needed = {}
    # x.clone() and model.clone() look alike: one that the strategy has is first
    for row in sorted(rows, key=lambda row: call_of(row.ours)[0] not in code):
        text, pattern = call_of(row.ours)
        if re.search(pattern, code) and (has_group or "dp." not in text):
            needed.setdefault(pattern, row)
    return sorted(needed.values())


def functions_for(strategy, declarations):
    """The functions among these declarations that a strategy calls."""
    own = {name for name, _ in FUNCTION.findall(strategy)}
    found = {}
    for name, parameters in FUNCTION.findall(declarations):
        call = re.search(rf"(?<![.>\w])((?:\w+::)?{name})\(", strategy)
        if call and name not in own:
            found.setdefault(name, call[1] + " ".join(parameters.split()))
    return found.values()


def comment_on_calls(strategy, page, declarations):
    """What an exercise says above the strategy that its reader writes: rows of
    the page, and functions among these declarations."""
    lines = []
    for row in rows_for(strategy, rows_of(page)):
        both = f"//   {row.ours:40}  {row.theirs}".rstrip()
        lines.append(both if len(both) <= 80 else f"//   {row.ours}")
        lines += textwrap.wrap(row.note, 80, initial_indent="//       ",
                               subsequent_indent="//       ")
    for function in functions_for(strategy, declarations):
        lines += textwrap.wrap(function, 80, initial_indent="//   ",
                               subsequent_indent="//       ")
    if lines:
        lines.insert(
            0, "// Calls that you need; chapters/from_pytorch.md has all:")
    return "".join(line + "\n" for line in lines)
