"""The explorer in a browser: it shows what the command line answers.

  page_test.py BUILD
"""

import asyncio
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "notebooks"))
BUILD = pathlib.Path(sys.argv.pop()).resolve()
PAGE = (BUILD / "explorer/index.html").as_uri()
JOBS = [
    {"model": "llama-3.1-8b", "cluster": "dgx-h100", "nodes": "1",
     "batch": "64", "seq": "8192", "dtype": "bf16"},
    {"model": "gpt-13b", "cluster": "selene", "nodes": "4", "batch": "128",
     "seq": "2048", "dtype": "bf16", "tp": "8"},
    {"model": "gpt2-xl", "cluster": "kaggle-t4x2", "nodes": "1", "batch": "16",
     "seq": "1024", "dtype": "f16", "device-memory": "1GB"},
    {"model": "gpt-13b", "cluster": "dgx-a100", "nodes": "1", "batch": "64",
     "seq": "2048", "dtype": "bf16", "tp": "3"},
    {"model": "gpt-13b", "cluster": "dgx-a100", "nodes": "1000000000",
     "batch": "64", "seq": "2048", "dtype": "bf16"},
    {"model": "gpt-13b", "cluster": "dgx-a100", "nodes": "NaN",
     "batch": "64", "seq": "2048", "dtype": "bf16"},
    {"model": "resnet50", "cluster": "dgx-a100", "nodes": "1", "batch": "64",
     "seq": "2048", "dtype": "bf16"},
]
# Over nodes, rings run one rank after the other; in a mesh of links all at once
WITH_CP = {"model": "llama-3.2-1b", "cluster": "dgx-h100", "nodes": "2",
           "batch": "16", "seq": "32768", "dtype": "bf16", "tp": "1",
           "zero-stage": "1", "pp": "1", "micro-batch": "1"}
IN_A_MESH = {"model": "llama-3.2-1b", "cluster": "dgx-v100", "nodes": "1",
             "batch": "32", "seq": "4096", "dtype": "f16"}
CONFIG = (ROOT / "tests/golden/llama_gqa/config.json").read_text("utf-8")
IS_READY = ("document.getElementById('answer')?.getAttribute('aria-busy') "
            "=== 'false'")
SCRIPT = (ROOT / "chapters/explorer/explorer.js").read_text("utf-8")
# Keeps what the page says of plans
HEADS = """
  window.heads = [];
  new MutationObserver(() => heads.push(
      document.getElementById("said").innerText + "\\n" +
      document.getElementById("head").innerText))
      .observe(document.getElementById("head"), { childList: true });
"""
# Keeps how far the page's bar was
LISTEN = """
  const bar = document.getElementById("progress");
  window.steps = [];
  new MutationObserver(() => steps.push(bar.position))
      .observe(bar, { attributes: true });
"""


def random_job(rng):
    """Few plans each: the degrees are given."""
    job = {
        "model": rng.choice(["gpt2-xl", "gpt-1.3b", "llama-3.2-1b",
                             "llama-3.1-8b", "mixtral-8x7b", "gpt2",
                             "config.json"]),
        "cluster": rng.choice(["dgx-a100", "dgx-h100", "kaggle-t4x2",
                               "selene"]),
        "nodes": str(rng.choice([1, 1, 2, 3])),
        "batch": str(rng.choice([8, 32, 48])),
        "seq": str(rng.choice([512, 1024, 2048, 0])),
        "dtype": rng.choice(["bf16", "f16", "f32"]),
        "tp": str(rng.choice([1, 2, 4, 3])), "pp": str(rng.choice([1, 2]))}
    if job["model"] == "config.json":
        job.update(config=json.dumps(json.loads(CONFIG)), seq="64")
    for name, values in {"device-memory": ["16GB", "1MB", "much"], "cp": [1],
                         "ep": [1, 2], "zero-stage": [0, 1, 2, 3],
                         "micro-batch": [1, 2, 1000],
                         "schedule": ["1f1b", "interleaved", "zb-h1"],
                         "recompute": ["never", "attention", "blocks"]}.items():
        if rng.random() < 0.3:
            job[name] = str(rng.choice(values))
    return job


def answer_of_program(job, *more):
    with tempfile.TemporaryDirectory() as folder:
        config = job.get("config")
        if config:
            pathlib.Path(folder, "config.json").write_text(config, "utf-8")
        words = [f"--{name}={value}" for name, value in job.items()
                 if name != "config"]
        return subprocess.run(
            [BUILD / "chapters/planner/shardbook_plan", *words, "--format=json",
             "--explain", "--top=8", *more], check=False, capture_output=True,
            text=True, cwd=folder)


def address(job):
    return urllib.parse.urlencode(job, quote_via=urllib.parse.quote)


class Page(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        import devtools
        self.page = devtools.Page()
        self.addCleanup(self.page.close)
        await self.page.open(devtools.find_browser(), "about:blank")

    async def load(self, job, **more):
        """A new page of a job, and its text."""
        await self.page.call("Page.navigate", url="about:blank")
        await self.page.call("Page.navigate",
                             url=f"{PAGE}#{address({**job, **more})}")
        await self.page.until(IS_READY, "an answer")
        return await self.text()

    async def text(self):
        return await self.page.value("document.body.innerText")

    async def turn_to(self, job):
        """The loaded page with the address of another job, and its text."""
        await self.page.value(
            "document.getElementById('answer').removeAttribute('aria-busy');"
            f"history.replaceState(null, '', '#' + {json.dumps(address(job))});"
            "dispatchEvent(new Event('hashchange'))")
        await self.page.until(IS_READY, f"an answer to {job}")
        return await self.text()

    async def give(self, text, times=1, drops=False):
        """Chooses or drops a file with this text, so many times over."""
        await self.page.value("""((text) => {
          const dropped = new DataTransfer();
          dropped.items.add(new File([text], "config.json"));
          const field = document.forms.job.elements.file;
          document.getElementById("answer").removeAttribute("aria-busy");
          if (%d) {
            document.body.dispatchEvent(new DragEvent("drop", {
              dataTransfer: dropped, bubbles: true, cancelable: true }));
          } else {
            field.files = dropped.files;
            field.dispatchEvent(new Event("input", { bubbles: true }));
          }
        })(%s.repeat(%d))""" % (drops, json.dumps(text), times))
        await self.page.until(IS_READY, "an answer to the file")
        return await self.text()

    def assert_shows(self, text, program):
        if program.returncode == 2:
            error = program.stderr.removeprefix("error: ").strip()
            self.assertIn(error, text)
            return "error"
        answer = json.loads(program.stdout)
        self.assertIn(f"{answer['plans']:,} plans are legal", text)
        if not answer["best"]:
            self.assertIn("No plan fits", text)
            return "none"
        best = answer["best"][0]
        for part in (best["layout"], best["command"],
                     *(part["formula"] for kind in ("memory", "time", "sent")
                       for part in answer["explain"][kind])):
            self.assertIn(part, text)
        return "plan"

    async def test_the_page_shows_what_the_program_answers(self):
        rng = random.Random(65)
        jobs = [*JOBS, *(random_job(rng) for _ in range(30))]
        await self.load(jobs[0])
        seen = set()
        for job in jobs:
            with self.subTest(job):
                seen.add(self.assert_shows(await self.turn_to(job),
                                           answer_of_program(job)))
        self.assertEqual(seen, {"error", "none", "plan"})

    async def test_a_changed_field_asks_again_and_is_in_the_address(self):
        await self.load(JOBS[0])
        await self.page.value("""(() => {
          const nodes = document.forms.job.elements.nodes;
          nodes.value = "2";
          nodes.dispatchEvent(new Event("input", { bubbles: true }));
        })()""")
        expected = json.loads(
            answer_of_program({**JOBS[0], "nodes": "2"}).stdout)
        await self.page.until(
            "location.hash.includes('nodes=2') && "
            f"document.body.innerText.includes("
            f"{json.dumps(expected['best'][0]['command'])})", "two nodes")

    async def test_a_plan_is_shown_until_the_search_ends(self):
        def best_of(job):
            best = json.loads(answer_of_program(job).stdout)["best"]
            return best[0] if best else None
        first = dict(re.findall(r'"?([\w-]+)"?: "(.*?)"', re.search(
            r"FIRST = {(.*?)}", SCRIPT, re.S)[1]))
        last = best_of(first)
        self.assertEqual(re.search(r'FIRST_PLAN = "(.*?)"', SCRIPT)[1],
                         f"{last['layout']}; {last['work']}")
        await self.page.call("Page.navigate", url=PAGE)
        await self.page.until("!!document.querySelector('#head h2')", "a plan")
        await self.page.value(HEADS)
        await self.page.until(IS_READY, "an answer")
        usual = {"tp": "8", "cp": "1", "zero-stage": "1", "micro-batch": "1"}
        for change, said, more in (
                ({"nodes": "16"}, "The last plan, on this job", {}),
                # Of ZeRO-3, which has no stages
                ({"pp": "4"}, "A usual plan", usual),
                ({"device-memory": "24GB"}, "which does not fit",
                 {"device-memory": "1000TB"}),
                # cp 2 and tp 8 need more devices
                ({"nodes": "1", "tp": "8"}, None, {})):
            with self.subTest(change):
                job = {**first, **change}
                await self.page.value("heads.length = 0")
                text = await self.turn_to(job)
                self.assert_shows(text, answer_of_program(job))
                heads = await self.page.value("heads")
                if not said:
                    self.assertNotIn(" on this job", "".join(heads))
                    continue
                same = {"tp": last["tp"], "pp": last["pp"], "cp": last["cp"],
                        "zero-stage": last["zero_stage"], "recompute": "never",
                        "micro-batch": last["micro_batch"]}
                limits = {**more, **job} if more is usual else {
                    **same, **job, **more}
                self.assertIn(said, heads[0])
                self.assertIn(f"{best_of(limits)['layout']}: ", heads[0])
                self.assertIn(
                    f" of {change.get('device-memory', '80GB')[:2]} GB", heads[0])
                self.assertNotIn(said, text)
                last = best_of(job) or last

    async def test_a_config_is_read_and_is_in_the_address(self):
        job = {**JOBS[0], "seq": "64", "model": "config.json"}
        program = answer_of_program({**job, "config": CONFIG})
        self.assertEqual(program.returncode, 0)
        await self.load({**JOBS[0], "seq": "64"})
        self.assert_shows(await self.give(CONFIG), program)
        await self.turn_to({**JOBS[0], "seq": "64"})
        self.assert_shows(await self.give(CONFIG, drops=True), program)
        url = await self.page.value("location.href")
        await self.page.call("Page.navigate", url="about:blank")
        await self.page.call("Page.navigate", url=url)
        await self.page.until(IS_READY, "an answer")
        self.assert_shows(await self.text(), program)

    async def test_wrong_files_have_the_sentences_of_the_program(self):
        await self.load(JOBS[0])
        for text in ("no config", "[]", '{"model_type": "mamba"}'):
            program = answer_of_program(
                {**JOBS[0], "model": "config.json", "config": text})
            self.assertEqual(program.returncode, 2)
            self.assert_shows(await self.give(text), program)
        self.assertIn("config.json: longer than 8 MiB",
                      await self.give("0123456789", 5_000_000))
        self.assertNotIn("0123456789", await self.page.value("location.hash"))

    async def test_two_plans_are_compared(self):
        best = json.loads(answer_of_program(JOBS[0]).stdout)["best"]
        name = f"{best[1]['layout']}; {best[1]['work']}"
        self.assertEqual(name, "dp 8, ZeRO-2; 8 x 1")
        other = answer_of_program({**JOBS[0], "zero-stage": "2", "tp": "1",
                                   "pp": "1", "cp": "1", "micro-batch": "1",
                                   "recompute": "never"})
        ask = f"[...document.links].find((a) => a.text === {json.dumps(name)})"
        text = await self.load(JOBS[0])
        self.assertNotIn("Compared with", text)
        await self.page.value(f"{ask}.click()")
        await self.page.until(IS_READY, "the comparison")
        text = await self.text()
        self.assertIn(f"Compared with {name}", text)
        answer = json.loads(other.stdout)
        for kind in ("memory", "time"):
            for part in answer["explain"][kind]:
                self.assertIn(part["formula"], text)
        # Bars on one scale: that of the longer step
        widths = await self.page.value("""[...document.querySelectorAll(
            "#time .bar")].map((bar) => [...bar.children].reduce(
                (sum, part) => sum + parseFloat(part.style.width), 0))""")
        steps = [best[0]["step_s"], answer["best"][0]["step_s"]]
        self.assertEqual(len(widths), 2)
        for width, step in zip(widths, steps):
            self.assertAlmostEqual(width, 100 * step / max(steps), 3)
        # The address has the comparison
        self.assertEqual(await self.load(JOBS[0], **{"with": name}), text)
        await self.page.click("#head button")
        await self.page.until("!document.body.innerText.includes('Compared')",
                              "the end of the comparison")
        self.assertNotIn("with=", await self.page.value("location.hash"))

    async def test_a_plan_that_does_not_fit_is_compared(self):
        text = await self.load(JOBS[0], **{"with": "dp 8; 8 x 1"})
        self.assertIn("Compared with dp 8; 8 x 1", text)
        self.assertIn("needs more memory than a device has", text)
        plan = ("tp 2 x pp 2 x dp 2, SP, ZeRO-1; 8 x 4, interleaved 4, "
                "recompute blocks")
        text = await self.load(JOBS[0], **{"with": plan})
        self.assertIn(f"Compared with {plan}:", text)
        self.assertNotIn("was asked for", text)

    async def test_all_plans_are_points_that_keys_reach(self):
        answer = json.loads(answer_of_program(JOBS[0], "--points").stdout)
        rows = sorted(answer["points"]["rows"], key=lambda row: row[2])
        names = [f"{layout}; {work}" for layout, work, *_ in rows]
        await self.load(JOBS[0])

        def cloud(value):
            return self.page.value(
                f"document.querySelector('.cloud').{value}")
        await cloud("focus()")
        self.assertEqual(await cloud("ariaValueMax"), str(answer["plans"]))
        self.assertEqual(len(rows), answer["plans"])
        for keys, at in ((["Home"], 0), (["ArrowRight"], 1), (["End"], -1)):
            await self.page.press(*keys)
            self.assertEqual((await cloud("ariaValueText")).split("\n")[0],
                             names[at])
            self.assertEqual(await self.page.value("tip.textContent"),
                             await cloud("ariaValueText"))
        # Places are those of numbers: the best one's own point is the cloud's
        best = names.index("dp 8, ZeRO-3; 8 x 1")
        await self.page.press("Home", *["PageUp"] * (best // 50),
                         *["ArrowRight"] * (best % 50))
        gaps = await self.page.value("""(() => {
          const middle = (query) => {
            const box = document.querySelector(query).getBoundingClientRect();
            return [box.left + box.width / 2, box.top + box.height / 2];
          };
          const [x, y] = middle(".cloud i"), [a, b] = middle(".point");
          return [Math.abs(x - a), Math.abs(y - b)];
        })()""")
        self.assertLess(max(gaps), 1)
        await self.page.press("ArrowRight", "Enter")
        await self.page.until(IS_READY, "the comparison")
        self.assertIn("Compared with", await self.text())

    async def test_the_timeline_is_the_planners(self):
        job = {**JOBS[1], "tp": "2", "pp": "4", "schedule": "1f1b"}
        answer = json.loads(answer_of_program(job).stdout)
        timeline = answer["explain"]["timeline"]
        await self.load(job)
        lanes = await self.page.value(
            "[...document.querySelectorAll('svg.lane')].map((svg) => "
            "svg.ariaLabel.match(/busy ([\\d.]+)/)[1])")
        self.assertEqual(len(lanes), 4)
        optimizer = dict((name, end - begin)
                         for name, begin, end in timeline["after"])["optimizer"]
        for shown, lane in zip(lanes, timeline["lanes"]):
            busy = optimizer + sum(end - begin
                                   for *_, begin, end in lane["actions"])
            self.assertAlmostEqual(
                float(shown), 100 * busy / timeline["seconds"], 0)
        kept = await self.page.value(
            "[...document.querySelectorAll('svg.memory')].map((svg) => "
            "svg.ariaLabel.match(/at most ([\\d.]+)/)[1])")
        for shown, lane in zip(kept, timeline["lanes"]):
            self.assertAlmostEqual(
                float(shown), max(each for _, each in lane["kept"]) / 1e9, 1)
        # Keys lead through the actions, one after the other
        said = await self.page.value("""(() => {
          const lane = document.querySelector("svg.lane"), said = [];
          const count = %d;
          for (let i = 0; i < count; ++i) {
            lane.dispatchEvent(new KeyboardEvent("keydown",
                                                 { key: "ArrowRight" }));
            said.push(tip.textContent.split("\\n")[0]);
          }
          return said;
        })()""" % len(timeline["lanes"][0]["actions"]))
        names = {"F": "forward", "B": "backward", "W": "backward of weights"}
        self.assertEqual(
            [each.split(",")[0] for each in said],
            [f"{names[kind]} of micro-batch {micro_batch}"
             for kind, micro_batch, *_ in timeline["lanes"][0]["actions"]])

    async def test_a_stopped_search_leaves_the_page_at_once(self):
        await self.load(JOBS[0])
        long = {**JOBS[0], "model": "llama-3.1-70b", "nodes": "8",
                "batch": "512"}
        await self.page.value(f"location.hash = {json.dumps(address(long))}")
        await self.page.until("!document.getElementById('stop').hidden",
                              "a button")
        # In one task: nothing waits for the planner
        self.assertTrue(await self.page.value(
            "document.getElementById('stop').click(), " + IS_READY))
        self.assertIn("Stopped", await self.text())
        self.assert_shows(await self.turn_to(JOBS[1]),
                          answer_of_program(JOBS[1]))

    async def test_rings_that_run_at_once_are_left_out(self):
        await self.load(JOBS[0])
        await self.page.value(LISTEN)
        self.assert_shows(await self.turn_to(WITH_CP),
                          answer_of_program(WITH_CP))
        self.assertTrue([step for step in await self.page.value("steps")
                         if 0 < step < 1])
        text = await self.turn_to(IN_A_MESH)
        self.assert_shows(text, answer_of_program({**IN_A_MESH, "cp": "1"}))
        self.assertIn("without plans that cut sequences", text)
        text = await self.turn_to({**IN_A_MESH, "cp": "2"})
        self.assertIn("several ranks would run at once", text)

    async def test_megatrons_arguments_are_the_job_that_was_counted(self):
        async def arguments(job):
            await self.turn_to(job)
            text = await self.page.value("""[...document.querySelectorAll(
                ".source")].map((each) => each.innerText).find(
                    (text) => text.includes("pretrain_gpt"))""")
            return dict(re.findall(r"--([\w-]+) ?([^-\\\s]*)", text)), text
        await self.load(JOBS[0])
        for model in ("llama-3.1-8b", "gpt-1.3b", "mixtral-8x7b",
                      "qwen3-30b-a3b", "llama-3.2-1b"):
            job = {**JOBS[0], "model": model, "seq": "2048", "nodes": "4",
                   "tp": "2" if model == "llama-3.1-8b" else "1"}
            given, _ = await arguments(job)
            counted = json.loads(subprocess.run(
                [BUILD / "chapters/planner/shardbook_plan", "--model", model,
                 "--format", "json"], check=True, capture_output=True).stdout)
            self.assertEqual(parameters(given), counted["parameters"], model)
            self.assertIn("grad-reduce-in-bf16", given)
            best = json.loads(answer_of_program(job).stdout)["best"][0]
            self.assertEqual(
                [given["tensor-model-parallel-size"],
                 given["pipeline-model-parallel-size"],
                 given["micro-batch-size"], given["global-batch-size"]],
                [str(each) for each in (best["tp"], best["pp"],
                                        best["micro_batch"], job["batch"])])
            self.assertEqual(
                "use-distributed-optimizer" in given, best["zero_stage"] == 1)
        # Blocks of the stages; Megatron-LM's own cut where it is the same
        cut = {**JOBS[0], "model": "gpt-1.3b", "seq": "2048", "batch": "32",
               "nodes": "1", "schedule": "interleaved"}
        given, _ = await arguments({**cut, "pp": "4"})
        self.assertEqual(given["num-layers-per-virtual-pipeline-stage"], "1")
        given, text = await arguments({**cut, "pp": "2"})
        self.assertNotIn("virtual", text)
        self.assertIn('layout "E|' + 24 * "t|" + 'L"', text)
        _, text = await arguments({**cut, "pp": "2", "schedule": "zb-h1"})
        self.assertNotIn("virtual", text)
        self.assertIn("no ZB-H1", await self.text())

    async def test_the_language_changes_and_all_else_stays(self):
        words = json.loads((ROOT / "chapters/explorer/words.json").read_text("utf-8"))
        for more in ({"with": "dp 8; 8 x 1", "zero-stage": "0"}, {"tp": "3"}):
            job = {**JOBS[0], **more}
            english = await self.load(job, lang="en")
            await self.load(JOBS[0])
            chinese = await self.turn_to({**job, "lang": "zh-CN"})
            for text in words.values():
                if text.count(" ") > 3 and "{" not in text:
                    self.assertNotIn(text, chinese)
            # All that is shown, without another search
            for lang, expected in (("en", english), ("zh-CN", chinese)):
                await self.page.click("#language")
                self.assertTrue(await self.page.value(IS_READY))
                await self.page.until(
                    f"document.body.innerText === {json.dumps(expected)}", lang)
                given = urllib.parse.parse_qsl(
                    (await self.page.value("location.hash"))[1:])
                self.assertEqual(dict(given), {**job, "lang": lang})
                self.assertEqual(
                    await self.page.value("document.documentElement.lang"), lang)
            # Chosen last; an address has its own
            self.assertEqual(await self.load(job), chinese)
            self.assertEqual(await self.load(job, lang="en"), english)
            self.assertEqual(await self.load(job, lang="toString"), english)
        # While an answer is being shown
        await self.load(JOBS[0], lang="zh-CN")
        await self.page.value("""new MutationObserver((_, observer) => {
          observer.disconnect();
          document.getElementById("language").click();
        }).observe(document.getElementById("head"), { childList: true })""")
        text = await self.turn_to({**JOBS[0], "lang": "zh-CN"})
        self.assertEqual(text, await self.load(JOBS[0], lang="en"))

    async def test_nothing_leaves_the_page(self):
        await self.load(JOBS[0])
        asked = await self.page.value(
            "performance.getEntriesByType('resource').map((e) => e.name)"
            ".filter((name) => !/^(blob|data):/.test(name))")
        self.assertEqual(asked, [])

    async def test_everybody_can_read_and_use_the_page(self):
        checks = (ROOT / "tests/report/accessible.js").read_text("utf-8")
        for scheme in ("light", "dark"):
            for width in (390, 768, 1400):
                await self.page.call("Emulation.setEmulatedMedia", features=[
                    {"name": "prefers-color-scheme", "value": scheme}])
                await self.page.call(
                    "Emulation.setDeviceMetricsOverride", width=width,
                    height=900, deviceScaleFactor=1, mobile=False)
                await self.load(JOBS[0], **{
                    "with": "dp 8, ZeRO-2; 8 x 1", "ep": "1",
                    "lang": "zh-CN" if width == 390 else "en"})
                await self.page.value(checks + "; window.checked = true")
                for check in ('brokenRules(["h1", "main", "header"])',
                              "paleParts()"):
                    self.assertEqual(await self.page.value(check), [],
                                     f"{check}, {scheme}, {width}")
                self.assertLessEqual(await self.page.value(
                    "document.documentElement.scrollWidth - innerWidth"), 0)
        # Tab leads through all that can be used, as it stands in the page
        count = await self.page.value("watchFocus()")
        self.assertGreater(count, 30)
        await self.page.press(*["Tab"] * count)
        self.assertEqual(await self.page.value("reached"),
                         [[i, True] for i in range(count)])


def parameters(given):
    """Of the model that Megatron-LM builds from these arguments."""
    size = {name: int(value) for name, value in given.items()
            if value.isdigit()}
    h, heads = size["hidden-size"], size["num-attention-heads"]
    head = size.get("kv-channels", h // heads)
    qkv = (heads + 2 * size.get("num-query-groups", heads)) * head
    has_bias = "disable-bias-linear" not in given
    has_shift = given.get("normalization") != "RMSNorm"
    norm = h * (1 + has_shift)
    gated = 1 + ("swiglu" in given)

    def mlp(f):
        return h * f * (gated + 1) + has_bias * (f * gated + h)

    experts = size.get("num-experts")
    block = (h * qkv + heads * head * h + has_bias * (qkv + h) + 2 * norm
             + ("qk-layernorm" in given) * 2 * head
             + (experts * (mlp(size["moe-ffn-hidden-size"]) + h) if experts
                else mlp(size["ffn-hidden-size"])))
    tables = 1 + ("untie-embeddings-and-output-weights" in given)
    positions = (0 if given.get("position-embedding-type") == "rope"
                 else size["max-position-embeddings"])
    return (size["num-layers"] * block + norm
            + (tables * size["vocab-size"] + positions) * h)


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
