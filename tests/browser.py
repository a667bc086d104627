"""A headless Chromium, driven over its debugging pipe: what a page does, loads and says."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import tempfile

from matplotlib.image import imread

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page; use as a context manager."""

    def __enter__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.to = os.pipe()
        self.answers, from_browser = os.pipe()
        # The browser reads its commands from descriptor 3 and answers on 4.
        redirect = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", redirect, CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
             f"--user-data-dir={self.profile.name}"],
            pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.rest, self.events = 0, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *failure):
        os.killpg(self.process.pid, signal.SIGKILL)  # and the processes that it started
        self.process.wait()
        os.close(self.to)
        os.close(self.answers)
        self.profile.cleanup()

    session = None

    def call(self, method, **parameters):
        """One command; events that come before its answer are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, url, width, **media):
        """Loads a page in a window of that width; returns the events meanwhile."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        features = [{"name": name.replace("_", "-"), "value": v} for name, v in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._receive())
        return list(self.events)

    def evaluate(self, expression):
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def shot(self, selector):
        """(height, width, channels) pixels of the first element that a selector finds, 0 to 1."""
        box = self.evaluate(
            f"document.querySelector('{selector}').getBoundingClientRect().toJSON()"
        )
        clip = {name: box[name] for name in ("x", "y", "width", "height")} | {"scale": 1}
        found = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return imread(io.BytesIO(base64.b64decode(found["data"])))

    def _receive(self):
        while b"\0" not in self.rest:
            data = os.read(self.answers, 1 << 20)
            assert data, "the browser ended"
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)
