"""Runs the tests that Meson knows and counts GoogleTest's cases one by one.

  run_tests.py targets BUILD [FILTER...]       prints what has to be built
  run_tests.py run BUILD [OPTIONS] [FILTER...] runs; the last line is the count

  --jobs N         at most N programs at once
  --sanitize LIST  what the build was made with

A FILTER is a room (the name of a Meson test), a pattern, room:pattern, !room:
all rooms but that one, or !pattern: all tests but those. A pattern is
GoogleTest's; without a * it may stand anywhere in Suite.Case. Behind a ! it
has a *.

Exit status: 0 all passed, 1 a test failed or none ran, 2 nothing matches.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as xml

from test_sources import ROOT, may_match, with_headers

Case = collections.namedtuple("Case", "state detail")


class Refusal(SystemExit):
    """A mistake in the command."""


def read_json(build, name):
    return json.loads((build / "meson-info" / name).read_text("utf-8"))


def left_out_patterns(filters):
    return [text[1:] for text in filters
            if text.startswith("!") and "*" in text]


def select(rooms, filters):
    """Pairs (room names, pattern or None): what runs together."""
    left_out = {text[1:] for text in filters
                if text.startswith("!") and "*" not in text}
    for room in left_out - set(rooms):
        raise Refusal(f"!{room}: there is no such room; there are "
                      + ", ".join(rooms))
    rooms = [room for room in rooms if room not in left_out]
    filters = [text for text in filters if not text.startswith("!")]
    whole = [room for room in rooms if room in filters or not filters]
    chosen = [(whole, None)] if whole else []
    for text in filters:
        room, _, pattern = text.partition(":")
        if text in rooms:
            continue
        if room in rooms and pattern:
            chosen.append(([room], pattern))
        else:
            chosen.append((rooms, text))
    return chosen


def refuse_unknown(rooms, filters):
    """Finds filters that no test can match, before anything is built."""
    for pattern in left_out_patterns(filters):
        if not may_match(pattern):
            raise Refusal(f"!{pattern}: no test matches it")
    for _, pattern in select(rooms, filters):
        if pattern and not may_match(gtest_filter(pattern, [])):
            raise Refusal(f"no test matches {gtest_filter(pattern, [])}; the "
                          "rooms are " + ", ".join(rooms))


def sources_by_room(build, tests):
    """The sources below tests/ of each room's program, headers and libraries of
    tests included."""
    build = build.resolve()
    sources = collections.defaultdict(set)
    for target in read_json(build, "intro-targets.json"):
        found = set()
        for group in target.get("target_sources", []):
            found.update(group.get("sources", []))
            # A unity source includes the others
            for path in map(pathlib.Path, group.get("generated_sources", [])):
                if "-unity" in path.name and path.is_file():
                    found.update(re.findall("#include ?<(.+)>",
                                            path.read_text("utf-8")))
        paths = map(pathlib.Path.resolve, map(pathlib.Path, found))
        sources[target["filename"][0]] |= {
            path for path in paths
            if ROOT / "tests" in path.parents and path.is_file()}
    # Programs that are linked with libraries of tests
    link = re.compile(r"^build (tests/\S+): \w+_LINKER (.*)$", re.M)
    rules = (build / "build.ninja").read_text("utf-8")
    for program, inputs in link.findall(rules):
        for library in re.findall(r"tests/\S+\.a\b", inputs):
            sources[str(build / program)] |= sources[str(build / library)]
    return {test["name"]: with_headers(sources[test["cmd"][0]])
            for test in tests}


def chosen_tests(build, tests, filters):
    """Pairs (tests, pattern or None): what runs together. Of a pattern, those
    whose sources may have a name that it matches."""
    sources = None
    for rooms, pattern in select([t["name"] for t in tests], filters):
        chosen = [t for t in tests if t["name"] in rooms]
        if pattern:
            sources = sources or sources_by_room(build, tests)
            chosen = [t for t in chosen if may_match(gtest_filter(pattern, []),
                                                     sources[t["name"]])]
        yield chosen, pattern


def targets(build, filters):
    """Prints what Ninja has to build for the chosen rooms."""
    tests = read_json(build, "intro-tests.json")
    refuse_unknown([t["name"] for t in tests], filters)
    files = {t["id"]: t["filename"] for t in read_json(build,
                                                       "intro-targets.json")}
    wanted = set()
    for chosen, _ in chosen_tests(build, tests, filters):
        for test in chosen:
            for target in test["depends"]:
                wanted.update(files.get(target, []))
    for path in sorted(wanted):
        print(pathlib.Path(path).relative_to(build))


def is_googletest(command):
    """Tells by the names that GoogleTest leaves in a program."""
    try:
        program = pathlib.Path(command[0]).read_bytes()
    except OSError:
        return False
    return program.startswith(b"\x7fELF") and b"N7testing4Test" in program


def gtest_filter(pattern, without):
    """GoogleTest's filter; None where all tests run."""
    if pattern and "*" not in pattern and "?" not in pattern:
        pattern = f"*{pattern}*"
    if not without:
        return pattern
    # GoogleTest reads all behind the first - as left out
    before, _, after = (pattern or "*").partition("-")
    return f'{before}-{":".join(filter(None, [after, *without]))}'


def has_match(command, pattern, prefix):
    listing = subprocess.run(
        prefix + command + ["--gtest_list_tests", f"--gtest_filter={pattern}"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    return any(line.startswith("  ") for line in listing.stdout.splitlines())


# Gives each program a folder for its report. A program started by a test
# inherits the folder too; it ends before its parent, so the last file counts.
# Meson's own --gtest_output (protocol: 'gtest') would hide the report.
WRAPPER = """
folder=$(mktemp -d "$0/XXXXXX")
for word; do
  shift
  [[ $word == --gtest_output=* ]] || set -- "$@" "$word"
done
printf '%s\\0' "$@" >"$folder/command"
GTEST_OUTPUT="xml:$folder/" exec "$@"
"""


Pace = collections.namedtuple("Pace", "timeout_multiplier prefix")


def suit_sanitizer(sanitizers):
    """Time for a slow machine that runs a second suite beside this one.

    Sanitized programs need more of it; the thread sanitizer, more than that.

    Returns the pace of the tests, and sets the environment of their programs.
    """
    if "address" in sanitizers:
        # Keeping thirty frames of each allocation is a sixth of the time
        os.environ.setdefault("ASAN_OPTIONS", "malloc_context_size=4")
    if sanitizers != "thread":
        return Pace(10 if sanitizers else 3, [])
    # oneDNN's own OpenMP is out of the sanitizer's sight: one thread each.
    os.environ["OMP_NUM_THREADS"] = "1"
    suppressions = pathlib.Path(__file__).with_name("tsan_suppressions.txt")
    options = os.environ.get("TSAN_OPTIONS", "second_deadlock_stack=1")
    os.environ["TSAN_OPTIONS"] = f"{options}:suppressions={suppressions}"
    # Some kernels randomise addresses more than the sanitizer can map.
    prefix = ["setarch", "-R"]
    works = shutil.which("setarch") and not subprocess.run(
        prefix + ["true"], stderr=subprocess.DEVNULL).returncode
    return Pace(20, prefix if works else [])


def run_meson(build, rooms, pattern, reports, pace, jobs):
    """Runs `rooms`; returns Meson's record of each."""
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    for log in (build / "meson-logs").glob("testlog*.json"):
        log.unlink()
    wrapper = pace.prefix + ["bash", "-c", WRAPPER, str(reports)]
    command = ["meson", "test", "-C", str(build), "--no-rebuild",
               "--num-processes", str(jobs),
               "--timeout-multiplier", str(pace.timeout_multiplier),
               "--wrapper", shlex.join(wrapper)]
    if pattern:
        command = ["env", f"GTEST_FILTER={pattern}"] + command
    # Tests share the cores: threads that spin while they wait take them from others
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    meson = subprocess.Popen(command + rooms, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True)
    output = []
    for line in meson.stdout:
        output.append(line)
        if re.match(r" *\d+/\d+ ", line):
            print(line, end="", flush=True)
    meson.wait()
    logs = list((build / "meson-logs").glob("testlog*.json"))
    if not logs:
        sys.exit("".join(output) + "shardbook: meson test did not run")
    log = logs[0]
    return [json.loads(line) for line in log.read_text("utf-8").splitlines()]


def find_report(reports, command):
    """The last report written below the folder of `command`, if any."""
    for folder in sorted(reports.iterdir()):
        record = folder / "command"
        if not record.exists():
            continue
        if record.read_text("utf-8").split("\0")[:-1] != command:
            continue
        files = sorted(folder.glob("*.xml"), key=lambda f: f.stat().st_mtime_ns)
        record.unlink()
        try:
            return xml.parse(files[-1]).getroot() if files else None
        except xml.ParseError:
            return None
    return None


def cases_of_report(report):
    cases = {}
    for case in report.iter("testcase"):
        if case.get("status") == "notrun":
            continue
        name = f'{case.get("classname")}.{case.get("name")}'
        failures = [f.get("message", "") for f in case.findall("failure")]
        skipped = case.find("skipped")
        if failures:
            cases[name] = Case("failed", "\n".join(failures))
        elif skipped is not None or case.get("result") == "skipped":
            text = "" if skipped is None else skipped.get("message", "")
            cases[name] = Case("skipped", " ".join(text.splitlines()[1:]))
        else:
            cases[name] = Case("passed", "")
    return cases


MARK = re.compile(r"^\[ *(RUN|OK|FAILED|SKIPPED) *\] ([\w/]+\.[\w/]+)", re.M)


def cases_of_output(text, end):
    """The cases that a program printed before it ended too early."""
    cases = {}
    for mark, name in MARK.findall(text):
        cases[name] = {"OK": Case("passed", ""),
                       "SKIPPED": Case("skipped", ""),
                       "FAILED": Case("failed", "its output is in the log"),
                       "RUN": Case("failed", f"in it the program {end}")}[mark]
    return cases


def tail(text, lines=25):
    return "\n".join(text.strip().splitlines()[-lines:])


FAULT = re.compile(r"^.*(?:(?:ERROR|WARNING): \w+Sanitizer|runtime error:"
                   r"|^terminate called|Sanitizer:? CHECK failed)", re.M)


def last_words(text):
    """Why a program ended: a sanitizer's report from its first line on."""
    fault = FAULT.search(text)
    return ("\n".join(text[fault.start():].splitlines()[:25]) if fault
            else tail(text))


def ending(record):
    if record["result"] == "TIMEOUT":
        return "ran out of time"
    code = record["returncode"]
    return (f"was ended by signal {-code}" if code < 0 else
            f"ended with status {code}")


def judge(test, record, report, filtered):
    """The cases of one program: its own, or one for the whole program."""
    said = record.get("stdout", "") + record.get("stderr", "")
    good = record["result"] == "OK"
    if not is_googletest(test["cmd"]):
        state = {"OK": "passed", "SKIP": "skipped"}.get(record["result"],
                                                        "failed")
        if state == "skipped":
            return {"": Case(state, tail(said, 1).removeprefix("SKIPPED: "))}
        return {"": Case(state, tail(said))}
    cases = {} if report is None else cases_of_report(report)
    end = f"{ending(record)}\n{last_words(record.get('stderr', '') or said)}"
    printed = {} if good else cases_of_output(said, end)
    if not printed.keys() <= cases.keys():
        cases = printed  # no report, or that of a program the test started
    if not cases and good and not filtered:
        cases[""] = Case("failed", "ran no test")
    if not good and not any(c.state == "failed" for c in cases.values()):
        cases[""] = Case("failed", f"the program {end}")
    return cases


def run(build, args):
    tests = read_json(build, "intro-tests.json")
    if not tests:
        sys.exit("shardbook: no test ran; this build knows none")
    pace = suit_sanitizer(args.sanitize)
    without = left_out_patterns(args.filter)
    programs = [t["cmd"] for t in tests if is_googletest(t["cmd"])]
    for pattern in without:
        if not any(has_match(p, pattern, pace.prefix) for p in programs):
            raise Refusal(f"!{pattern}: no test that was built matches it")
    results = {}
    for chosen, pattern in chosen_tests(build, tests, args.filter):
        googletest = gtest_filter(pattern, without)
        if pattern:
            chosen = [t for t in chosen if is_googletest(t["cmd"]) and
                      has_match(t["cmd"], googletest, pace.prefix)]
            if not chosen:
                raise Refusal(f"no test that was built matches {googletest}; "
                              "the rooms are "
                              + ", ".join(t["name"] for t in tests))
        reports = build / "test-reports"
        records = run_meson(build, [t["name"] for t in chosen], googletest,
                            reports, pace, args.jobs)
        for test in chosen:
            for record in records:
                size = len(test["cmd"])
                if record["command"][-size:] == test["cmd"]:
                    report = find_report(reports, test["cmd"])
                    cases = judge(test, record, report, bool(pattern))
                    for name, case in cases.items():
                        results[test["name"], name] = case
                    records.remove(record)
                    break
            else:
                results[test["name"], ""] = Case("failed", "did not run")
    return report_results(results, build / "meson-logs")


def report_results(results, logs):
    def having(state):
        return [(" ".join(filter(None, key)), case.detail)
                for key, case in results.items() if case.state == state]

    reasons = collections.defaultdict(list)
    for name, detail in having("skipped"):
        reasons[detail or "no reason given"].append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"SKIPPED {names[0]}{more}: {reason}")
    for name, detail in having("failed"):
        lines = detail.splitlines()
        if len(lines) > 30:
            lines = lines[:30] + ["..."]
        print("\n    ".join([f"FAILED {name}"] + lines))
    if having("failed"):
        print(f"All output of the last tests is in {logs}")
    count = collections.Counter(case.state for case in results.values())
    if not count["passed"] + count["failed"]:
        print("shardbook: no test ran", file=sys.stderr)
    skipped = f', {count["skipped"]} skipped' if count["skipped"] else ""
    print(f'{count["passed"]} passed, {count["failed"]} failed{skipped}')
    return 1 if count["failed"] or not count["passed"] else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["targets", "run"])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("filter", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sanitize", default="")
    args = parser.parse_intermixed_args()
    build = args.build.resolve()
    try:
        if args.action == "targets":
            return targets(build, args.filter)
        return run(build, args)
    except Refusal as refusal:
        print(f"shardbook: {refusal}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
