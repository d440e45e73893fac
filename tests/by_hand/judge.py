"""Judges a run by its refusal or by its report."""

import collections
import json
import re

# A sentence that a user can act on: one line, which names an option; a config has
# a line for each mistake.
SENTENCE = re.compile(r"error: [^\n]{10,600}"
                      r"(\n(ds\.json|--config): [^\n]{10,600})*\n?\Z")
INTERNAL = re.compile(r"std::|json\.exception|foreseen on shapes|\bmeta:|"
                      r"terminate called|Assertion|\bbasic_string|vector::")


def judge_refusal(out, err, impossible):
    """What is wrong with exit status 2, or None."""
    if out:
        return ("message", "something stands on stdout: " + out[:200])
    if not SENTENCE.match(err) or INTERNAL.search(err):
        return ("message", "no sentence for a user: " + repr(err[:400]))
    # A config's keys are paths: "ds.json: /zero_optimization/stage 4"
    if not re.search(r"--|: /\w|out of memory|ds\.json: |train_\w+ \d", err):
        return ("message", "names no option: " + err.strip())
    return None


def pairs_of(report):
    """(claim, what, predicted, counted) for all numbers of a report."""
    for rank, pair in enumerate(report["bytes"]):
        yield "bytes", f"rank {rank} bytes", pair["predicted"], pair["counted"]
    for rank, kinds in enumerate(report["held_memory"]):
        for kind, pair in kinds.items():
            yield ("memory", f"rank {rank} {kind}", pair["predicted"],
                   pair["counted"])
    if report["virtual"] is not None:
        pair = report["virtual"]["step_s"]
        yield "time", "step", pair["closed_form"], pair["counted"]
        # Two clocks: that of the run on shapes, and that beside the data
        yield "clocks", "simulated step", pair["simulated"], pair["counted"]


def may_be_open(draw, what, report):
    """Counts that have no prediction, and say so."""
    if what.endswith("step"):
        return True
    # Rows that experts are given depend on the data
    text = " ".join([*draw.words, *map(str, draw.files.values())])
    if draw.judged_as == "13" and any(
            each in text for each in ("--dropless", "--no-drop-tokens",
                                      '"drop_tokens": false')):
        return what.endswith((" activation", " bytes"))
    # Those of a Mixtral have no capacity
    if "num_local_experts" in text:
        return what.endswith(" activation") or draw.judged_as == "13"
    return False


def judge_report(draw, status, out):
    """What is wrong with a report, or None."""
    try:
        report = json.loads(out)
    except ValueError as error:
        return ("output", f"no JSON: {error}")
    claims = report["claims"]
    differences = collections.defaultdict(list)
    missing = collections.defaultdict(list)
    for claim, what, predicted, counted in pairs_of(report):
        if predicted is None:
            if counted != 0 and not may_be_open(draw, what, report):
                missing[claim].append(f"{what} counted {counted}")
        elif abs(predicted - counted) > 1e-9 * abs(predicted):
            differences[claim].append(
                f"{what} predicted {predicted} counted {counted}")
    if claims["numbers"] == "failed":
        parity = report["parity"]
        differences["numbers"].append(
            f"relative {parity['max_rel']}, allowed {parity['tolerance']}")
    # Training that diverged, on one device as well, has no numbers to compare
    diverged = (bool(report.get("not_finite"))
                and not report["parity"]["one_device_finite"])
    # Nor has PipeDream without its stash, the lab of wrong gradients
    excused = diverged or "--no-stash" in draw.words
    if differences["clocks"]:
        return ("contradicted", differences["clocks"][0])
    failed = [name for name, verdict in claims.items() if verdict == "failed"
              and not (excused and name == "numbers")]
    if failed or (status == 1 and not excused):
        return ("claim", "; ".join(
            f"{name}: {', '.join(differences[name][:3])}" for name in failed)
                or "exit status 1 without a failed claim")
    for name, verdict in claims.items():
        if verdict != "passed":
            continue
        if differences[name]:
            return ("contradicted", f"{name}: {differences[name][0]}")
        if missing[name]:
            return ("unpredicted", f"{name}: {'; '.join(missing[name][:3])}")
    if draw.backend != "sim" and claims["numbers"] == "not measured":
        return ("unmeasured", "numbers: not measured")
    timed = report["virtual"] is not None and draw.backend != "sim"
    no_steps = report["options"]["steps"] == draw.steps_before
    if timed and not no_steps and claims["time"] == "not measured":
        return ("unmeasured", "time: not measured")
    return None
