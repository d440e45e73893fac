"""How soon pages of the site show something, from disk, and how far they then move.

  first_paint.py SITE [PAGE...]    such as build/book chapters/06_1f1b/index

prints for each page the median of five visits, each by a browser that has cached
nothing: milliseconds to the first text or picture, and the layout shift, which sums
moved parts of the window times their ways, as parts of it; it should be 0. Needs
Chromium and python3-tornado.
"""

import asyncio
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "notebooks"))
import devtools

PAGES = ["chapters/03_zero_fsdp/index", "chapters/06_1f1b/index",
         "chapters/07_tensor_parallel/index", "chapters/12_sequence_parallel/index",
         "chapters/13_moe/index"]
VISITS = 5
# In pages before their own scripts
OBSERVE = """
  window.painted = null;
  window.moved = 0;
  new PerformanceObserver((list) => {
    painted = list.getEntriesByName("first-contentful-paint")[0]?.startTime ?? painted;
  }).observe({ type: "paint", buffered: true });
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) moved += each.value;
  }).observe({ type: "layout-shift", buffered: true });
"""


async def visit(address, width=1280):
    """Milliseconds to the first paint, and the layout shift until the page has been
    scrolled to its end."""
    page = devtools.Page()
    try:
        await page.open(devtools.find_browser(), "about:blank")
        await page.call("Page.enable")
        await page.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                        deviceScaleFactor=1, mobile=False)
        await page.call("Page.addScriptToEvaluateOnNewDocument", source=OBSERVE)
        await page.call("Page.navigate", url=address)
        await page.until("document.readyState === 'complete' && painted", "a paint")
        await page.call("Runtime.evaluate", awaitPromise=True, expression="""
            (async () => {
              const wait = (ms) => new Promise((done) => setTimeout(done, ms));
              await document.fonts.ready;
              for (let y = 0; y < document.body.scrollHeight; y += 800) {
                scrollTo(0, y);
                await wait(20);
              }
              await wait(500);
            })()""")
        return await page.value("[painted, moved]")
    finally:
        page.close()


async def main(site, *pages):
    for name in pages or PAGES:
        address = pathlib.Path(site, name + ".html").resolve().as_uri()
        visits = [await visit(address) for _ in range(VISITS)]
        paint, shift = (statistics.median(each) for each in zip(*visits))
        print(f"{name:40} {paint:6.0f} ms   shift {shift:.4f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
