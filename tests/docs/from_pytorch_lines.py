"""Writes the lines of chapters/from_pytorch.md as C++: a type per line.

  from_pytorch_lines.py OUT
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "chapters" / "course"))

from vocabulary import rows_of  # noqa: E402

PAGE = ROOT / "chapters" / "from_pytorch.md"


def main(out):
    rows = rows_of(PAGE.read_text("utf-8"))
    text = "".join(f"""struct Line{row.line} : Names {{
  using Names::Names;
  void run() {{
#line {row.line} "chapters/from_pytorch.md"
    {row.ours}
  }}
}};
""" for row in rows)
    text += "const std::vector<Line> kLines = {\n" + "".join(
        f"    {{{row.line}, run<Line{row.line}>}},\n" for row in rows) + "};\n"
    pathlib.Path(out).write_text(text, "utf-8")


main(*sys.argv[1:])
