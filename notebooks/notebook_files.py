"""Notebooks as files: their outputs as text, and a form that stays the same."""

import difflib
import json
import re

METADATA = {
    "kernelspec": {"display_name": "C++17", "language": "C++17",
                   "name": "xcpp17"},
    "language_info": {"codemirror_mode": "text/x-c++src",
                      "file_extension": ".cpp", "mimetype": "text/x-c++src",
                      "name": "c++", "version": "17"},
}


def merged(outputs):
    """Outputs with the streams between two displays as one text each.

    How a kernel cuts a stream into messages, and which of two streams comes
    first, differ from run to run.
    """
    result = []
    streams = {}

    def end_streams():
        result.extend(streams[name] for name in sorted(streams, reverse=True))
        streams.clear()

    for output in outputs:
        if output.output_type != "stream":
            end_streams()
            result.append(output)
        elif output.name in streams:
            streams[output.name].text += output.text
        else:
            streams[output.name] = output.copy()
    end_streams()
    return result


def text_of(cell):
    """What a reader without pictures sees below a cell."""
    parts = []
    for output in merged(cell.get("outputs", [])):
        if output.output_type == "stream":
            parts.append(("" if output.name == "stdout" else "[stderr]\n")
                         + output.text)
        elif output.output_type == "error":
            parts.append(f"[{output.ename}]\n{output.evalue}\n")
        else:
            kinds = ", ".join(sorted(output.data))
            parts.append(f"[{kinds}]\n{output.data.get('text/plain', '')}\n")
    return "".join(parts)


def tags(cell):
    return cell.get("metadata", {}).get("tags", [])


# Four digits behind the point, such as those of a loss: sums of floats may round
# to another last digit on another processor.
ROUNDED = re.compile(r"\d+\.\d{4,}(?![\de])")


def same_text(was, now):
    """Whether two texts are equal, up to one in the last of many digits."""
    pairs = zip(ROUNDED.findall(was), ROUNDED.findall(now))
    return (ROUNDED.sub("#", was) == ROUNDED.sub("#", now)
            and all(len(a.split(".")[1]) == len(b.split(".")[1])
                    and abs(int(a.replace(".", "")) -
                            int(b.replace(".", ""))) <= 1
                    for a, b in pairs))


def differences(stored, executed):
    """One text for each cell that prints something else than the file has."""
    found = []
    for index, (old, new) in enumerate(zip(stored.cells, executed.cells)):
        if new.cell_type != "code":
            continue
        if "raises-exception" in tags(new) and not any(
                output.output_type == "error" for output in new.outputs):
            found.append(f"cell {index + 1} was expected to fail")
        was, now = text_of(old), text_of(new)
        if same_text(was, now) or "measured" in tags(new):
            continue
        lines = difflib.unified_diff(
            was.splitlines(), now.splitlines(), "in the file", "executed",
            lineterm="", n=1)
        found.append(f"cell {index + 1} prints something else than the file "
                     "has (--update stores it):\n" + "\n".join(lines))
    return found


def stable(notebook):
    """The notebook as plain data, in the form in which it is committed."""
    cells = []
    for index, cell in enumerate(notebook.cells):
        metadata = {key: value for key, value in cell.metadata.items()
                    if key != "execution"}
        kept = {"cell_type": cell.cell_type, "id": cell.get("id"),
                "metadata": metadata, "source": lines_of(cell.source)}
        if not kept["id"]:
            kept["id"] = f"cell-{index:02}"
        if cell.cell_type == "code":
            kept["execution_count"] = cell.get("execution_count")
            kept["outputs"] = [stable_output(output)
                               for output in merged(cell.outputs)]
        cells.append(kept)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4,
            "nbformat_minor": 5}


def stable_output(output):
    kept = {"output_type": output.output_type}
    if output.output_type == "stream":
        kept.update(name=output.name, text=lines_of(output.text))
    elif output.output_type == "error":
        kept.update(ename=output.ename, evalue=output.evalue,
                    traceback=[re.sub(r"\x1b\[[0-9;]*m", "", line)
                               for line in output.traceback])
    else:
        kept.update(metadata={}, data={
            kind: lines_of(value) if isinstance(value, str) else value
            for kind, value in output.data.items()})
    return kept


def lines_of(text):
    return text.splitlines(keepends=True)


def write(path, notebook):
    """Replaces the file, in one step."""
    text = json.dumps(stable(notebook), indent=1, sort_keys=True,
                      ensure_ascii=False) + "\n"
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
