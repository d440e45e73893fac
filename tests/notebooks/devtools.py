"""A headless Chromium, driven over its DevTools protocol."""

import asyncio
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

from tornado.websocket import websocket_connect

LIMIT_S = 90


def find_browser():
    for name in (os.environ.get("SHARDBOOK_BROWSER"), "chromium",
                 "chromium-browser", "google-chrome"):
        if name and shutil.which(name):
            return shutil.which(name)
    return None


class Page:
    """One page of a browser that belongs to this object."""

    async def open(self, browser, url):
        self.folder = tempfile.TemporaryDirectory(prefix="devtools-")
        profile = pathlib.Path(self.folder.name)
        # Containers give root no sandbox, and /dev/shm may be small. A browser
        # that is stopped leaves what it keeps in TMPDIR.
        self.process = subprocess.Popen(
            [browser, "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run",
             "--window-size=1280,1000", f"--user-data-dir={profile}",
             "--remote-debugging-port=0", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "TMPDIR": str(profile)})
        port_file = profile / "DevToolsActivePort"
        end = time.monotonic() + LIMIT_S
        while not (port_file.exists() and port_file.read_text().count("\n")):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError("the browser did not start")
            await asyncio.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        self.socket = await websocket_connect(
            f"ws://127.0.0.1:{port}{path}", max_message_size=1 << 27)
        self.next_id = 0
        self.session = None
        target = await self.call("Target.createTarget", url=url)
        attached = await self.call("Target.attachToTarget", flatten=True,
                                   targetId=target["targetId"])
        self.session = attached["sessionId"]
        return self

    async def call(self, method, **parameters):
        self.next_id += 1
        number = self.next_id
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        await self.socket.write_message(json.dumps(message))
        while True:
            text = await asyncio.wait_for(self.socket.read_message(), LIMIT_S)
            if text is None:
                raise RuntimeError("the browser has ended")
            answer = json.loads(text)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(answer["error"]["message"])
                return answer["result"]

    async def value(self, script):
        """What a JavaScript expression is in the page; None if it throws."""
        answer = await self.call("Runtime.evaluate", expression=script,
                                 returnByValue=True)
        if "exceptionDetails" in answer:
            return None
        return answer["result"].get("value")

    async def until(self, script, what):
        """Waits until an expression is true, and returns what it is."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            value = await self.value(script)
            if value:
                return value
            await asyncio.sleep(0.1)
        raise AssertionError(
            f"waited {LIMIT_S} s for {what}; the page ends with\n"
            + str(await self.value("document.body.innerText"))[-2000:])

    async def click(self, selector):
        clicked = await self.value(
            f"(() => {{ const e = document.querySelector({selector!r}); "
            "if (e) e.click(); return !!e; })()")
        if not clicked:
            raise AssertionError(f"the page has no {selector}")

    async def press(self, *keys):
        for key in keys:
            for kind in ("rawKeyDown", "keyUp"):
                await self.call(
                    "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                    windowsVirtualKeyCode={
                        "Tab": 9, "Enter": 13, "PageUp": 33, "End": 35,
                        "Home": 36, "ArrowRight": 39}[key])

    def close(self):
        if hasattr(self, "socket"):
            self.socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()
