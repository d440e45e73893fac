"""Things to touch in a browser: they show the numbers of the libraries.

  touch_test.py BUILD NATIVE
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "notebooks"))
NATIVE = sys.argv.pop()
BUILD = pathlib.Path(sys.argv.pop()).resolve()


def native(about, **question):
    line = json.dumps({"about": about, **question}) + "\n"
    return json.loads(subprocess.run([NATIVE], input=line, check=True, text=True,
                                     stdout=subprocess.PIPE).stdout)


def digits(value):
    return f"{float(f'{value:.4g}'):,.6f}".rstrip("0").rstrip(".")


def works_of(answer):
    """The events, and what each rank runs and keeps from each on."""
    times = sorted({time for rank in answer["ranks"]
                    for action in rank["actions"] for time in action[3:]})
    return times, [(
        ["&".join(f"{kind}{micro_batch}" + (f".{chunk}" if chunk else "")
                  for kind, micro_batch, chunk, begin, end in rank["actions"]
                  if begin <= time < end) or "nothing" for rank in answer["ranks"]],
        [[sets for begin, sets in rank["alive"] if begin <= time][-1]
         for rank in answer["ranks"]]) for time in times]


class Touch(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        import devtools
        self.page = devtools.Page()
        self.addCleanup(self.page.close)
        url = (BUILD / "explorer/touch.html").as_uri()
        await self.page.open(devtools.find_browser(), url)
        await self.page.until(
            "document.querySelectorAll('figure form').length === 5", "five things")

    async def of(self, thing, script):
        """An expression about a thing, which it calls `figure`."""
        return await self.page.value(
            "((figure) => " + script
            + f")(document.querySelector('[data-touch={thing}]'))")

    async def give(self, thing, **values):
        """Fills in fields; returns the thing's text."""
        done = await self.of(thing, """{
          for (const [name, value] of Object.entries(%s)) {
            const field = figure.querySelector(`[name=${name}]`);
            field.value = value;
            field.dispatchEvent(new Event("input", { bubbles: true }));
          }
          return figure.innerText;
        }""" % json.dumps(values))
        self.assertIsNotNone(done)
        return done

    async def go(self, thing, step):
        return await self.of(thing, """{
          const slider = figure.querySelector("[type=range]");
          slider.value = %d;
          slider.dispatchEvent(new Event("input"));
          return figure.innerText;
        }""" % step)

    async def test_a_schedule(self):
        for values in ({"name": "gpipe", "message": 0.5},
                       {"name": "zb-h1", "backward_weight": 0.7, "ranks": 3},
                       {"name": "interleaved", "chunks": 3, "ranks": 4},
                       {"name": "dualpipe"}):
            question = {"ranks": 4, "micro_batches": 8, **values}
            text = await self.give("schedule", **{"message": 0, "backward_weight": 1,
                                                  **question})
            answer = native("schedule", **question)
            most = ", ".join(str(rank["most"]) for rank in answer["ranks"])
            self.assertIn(f"takes {digits(answer['makespan'])} units;", text)
            self.assertIn(f"idle {digits(100 * answer['idle_share'])} %", text)
            self.assertIn(f"by rank: {most}.", text)
            drawn = await self.of("schedule",
                                  "figure.querySelectorAll('.F, .B, .I, .W').length")
            self.assertEqual(drawn, sum(len(rank["actions"])
                                        for rank in answer["ranks"]))
        # Both actions of a pair are seen: each has half of the lane
        halves = await self.of("schedule", "figure.querySelectorAll("
                               "'rect:is(.F, .B, .I)[height=\"11\"]').length")
        spans = [action[3:] for rank in answer["ranks"] for action in rank["actions"]]
        pairs = sum(one == two for one, two in zip(spans, spans[1:]))
        self.assertGreater(pairs, 0)
        self.assertEqual(halves, 2 * pairs)
        # Opens where it is fullest
        times, works = works_of(answer)
        fullness = [(sum(each != "nothing" for each in running), sum(alive))
                    for running, alive in works]
        fullest = [at for at, each in enumerate(fullness) if each == max(fullness)]
        step = fullest[len(fullest) // 2]
        self.assertNotIn("nothing", works[step][0])
        for at in (step, len(times) // 3):
            running, alive = works[at]
            self.assertIn(f"Time {digits(times[at])}. Running: {', '.join(running)}.",
                          text)
            self.assertIn(f"Sets: {', '.join(map(str, alive))}.", text)
            text = await self.go("schedule", len(times) // 3)

    async def test_a_schedule_of_the_readers_own(self):
        await self.give("schedule", name="1f1b", ranks=2, micro_batches=2)
        # Begins with what was shown
        before = await self.give("schedule", name="yours")
        lists = await self.of("schedule", "figure.querySelector('[name=text]').value")
        self.assertEqual(lists, "F0 F1 B0 B1\nF0 B0 F1 B1")
        self.assertIn("takes 9 units", before)
        wrong = "F0 B0 F1 B1\nF1 F0 B1 B0"
        text = await self.give("schedule", text=wrong)
        error = native("schedule", text=json.dumps(
            {"micro_batches": 2, "ranks": wrong.split("\n")}))["error"]
        self.assertIn("deadlock", error)
        self.assertIn(error, text)
        text = await self.give("schedule", text="F0 F1 B1 B0\nF0 F1 B1 B0")
        self.assertNotIn("deadlock", text)

        # Stages in another order than ranks
        await self.give("schedule", name="dualpipe", micro_batches=8, ranks=4)
        before = native("schedule", name="dualpipe", micro_batches=8, ranks=4)
        text = await self.give("schedule", name="yours", text="")
        wrong = await self.of("schedule", "figure.querySelector('.wrong').textContent")
        self.assertEqual(wrong, "")
        self.assertIn(f"takes {digits(before['makespan'])} units", text)

    async def test_zero(self):
        for values in ({"parameters": 7.5, "ranks": 64},
                       {"parameters": 70, "ranks": 3, "dtype": "f32",
                        "optimizer": "adam", "capacity": 40}):
            text = await self.give("zero", **values)
            answer = native("zero", **{
                **values, "parameters": 1e9 * values["parameters"],
                "capacity": 1e9 * values.get("capacity", 80)})
            shown = await self.of("zero",
                                  "figure.querySelector('[role=img]').ariaLabel")
            for stage in answer["stages"]:
                line = (f"{digits(stage['total'] / 1e9)} GB; "
                        f"{digits(stage['most'] / 1e9)} billion parameters fit")
                self.assertIn(line, shown)
        bars = await self.of("zero", "[...figure.querySelectorAll('.optimizer')].map("
                             "(bar) => bar.width.baseVal.value)")
        self.assertGreater(bars[0], 0)
        for bar in bars[1:4]:
            self.assertAlmostEqual(bar, bars[0] / 3, 2)

    async def test_the_mask(self):
        for layout in ("contiguous", "zigzag", "striped", "ulysses"):
            question = {"layout": layout, "ranks": 4, "tokens": 24, "heads": 8}
            await self.give("mask", **question)
            answer = native("mask", **question)
            works = [[hop["work"] for hop in rank["hops"]] for rank in answer["ranks"]]
            cells = await self.of("mask", "[...figure.querySelectorAll('td')].map("
                                  "(cell) => cell.textContent).slice(1)")
            self.assertEqual([*map(float, cells)],
                             [count for work in works for count in (*work, sum(work))])
            last = len(works[0]) - 1
            text = await self.go("mask", last)
            slowest = sum(map(max, zip(*works)))
            self.assertIn(f"The slowest rank has {digits(slowest)} in all", text)
            drawn = await self.of(
                "mask", "figure.querySelectorAll('rect:not(.empty)').length")
            self.assertEqual(drawn, 24 * 25 // 2)
        text = await self.give("mask", heads=3)
        self.assertIn(native("mask", layout="ulysses", heads=3)["error"], text)

    async def test_collectives(self):
        script = (BUILD / "explorer/touch.js").read_text("utf-8")
        frames = json.JSONDecoder().raw_decode(
            script[script.index('"frames": ') + len('"frames": '):])[0]
        for name, steps in frames.items():
            await self.give("collectives", collective=name)
            sent = [0] * 4
            for step, frame in enumerate(steps):
                text = await self.go("collectives", step)
                counts = [int(n or 1) if part else 0 for part, n in re.findall(
                    r"rank \d (?:0|((\d*)n/4))",
                    text[text.index("Sent so far"):])]
                self.assertEqual(counts, sent, name)
                stripes = await self.of("collectives", "figure.querySelectorAll("
                                        "'.r0, .r1, .r2, .r3').length")
                self.assertEqual(stripes, sum(int(bits).bit_count() for rank in
                                              frame["ranks"] for bits in rank))
                self.assertEqual(text.count(" sends "), len(frame["messages"]))
                for sender, _, _, count in frame["messages"]:
                    sent[sender] += count

    async def test_a_mesh(self):
        question = {"rows": 2, "columns": 3, "from_rows": "S(0)",
                    "from_columns": "S(0)", "to_rows": "R", "to_columns": "S(1)"}
        await self.give("mesh", **question)
        answer = native("mesh", **question)
        for step, layout in enumerate(answer["layouts"]):
            text = await self.go("mesh", step)
            self.assertIn(layout["placements"], text)
            shown = await self.of(
                "mesh", "[...figure.querySelectorAll('rect:not(.empty) title')]"
                ".map((title) => title.textContent)")
            self.assertEqual(shown, [
                f"[{row}:{row + height}, {column}:{column + width}]"
                for row, column, height, width in layout["blocks"]])
        for move in answer["moves"]:
            self.assertIn(len({*move["sent"]}), (1, 2))
        everything = [sum(ranks) for ranks in
                      zip(*(move["sent"] for move in answer["moves"]))]
        least, most = digits(min(everything)), digits(max(everything))
        self.assertIn(f"sends {least if least == most else f'{least} - {most}'} bytes",
                      text)

    async def test_buttons_have_names_and_pages_fit_a_phone(self):
        names = await self.page.value(
            "[...document.querySelectorAll('figure input, figure select, figure "
            "textarea')].every((field) => field.labels?.length || field.ariaLabel)")
        self.assertTrue(names)
        await self.page.call("Emulation.setDeviceMetricsOverride", width=390,
                             height=800, deviceScaleFactor=1, mobile=False)
        self.assertTrue(await self.page.until(
            "document.documentElement.scrollWidth <= 390", "a narrow page"))
        await self.give("collectives", collective="ring")
        await self.of("collectives", "figure.querySelectorAll('button')[1].click()")
        await self.page.until("document.querySelector('[data-touch=collectives]')"
                              ".innerText.includes('Step 6 of 6')", "the end")

    async def test_words_are_in_the_language_of_the_page(self):
        page = (BUILD / "explorer/touch.html").read_text("utf-8")
        script = (BUILD / "explorer/touch.js").as_uri()
        with tempfile.TemporaryDirectory() as folder:
            other = pathlib.Path(folder, "touch.html")
            other.write_text(page.replace('lang="en"', 'lang="zh-CN"').replace(
                'src="touch.js"', f'src="{script}"'))
            await self.page.call("Page.navigate", url=other.as_uri())
            await self.page.until(
                "document.querySelectorAll('figure form').length === 5", "five")
        text = await self.page.value("[...document.querySelectorAll('figure')].map("
                                     "(figure) => figure.innerHTML).join()")
        words = ROOT / "chapters/explorer/touch"
        here, there = (json.loads((words / name).read_text("utf-8"))
                       for name in ("words.json", "words.zh-CN.json"))
        for key, other in there.items():
            if key.startswith("field_"):
                self.assertIn(f">{other}<", text)
                self.assertNotIn(f">{here[key]}<", text)

    async def test_nothing_is_asked_of_another_file(self):
        asked = await self.page.value(
            "performance.getEntriesByType('resource').map((e) => e.name)"
            ".filter((name) => !name.endsWith('/touch.js'))")
        self.assertEqual(asked, [])


if __name__ == "__main__":
    try:
        import devtools
    except ImportError as missing:  # python3-tornado, which notebooks need
        print(f"skipped: {missing}")
        sys.exit(77)
    if not devtools.find_browser():
        print("skipped: no Chromium here")
        sys.exit(77)
    unittest.main()
