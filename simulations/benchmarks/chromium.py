"""A Chromium without a window, over its DevTools protocol: what a page does in a real browser.

It needs Debian's ``chromium`` (or Chrome) on the path and the package ``websockets``, which Flower
brings along. See https://chromedevtools.github.io/devtools-protocol.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-sandbox",  # containers run as root, and the pages are this project's own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
)
_CUT_OFF = """
(() => {
  document.querySelectorAll("details").forEach((d) => { d.open = true; });
  const width = document.documentElement.clientWidth;
  const found = new Set();
  if (document.documentElement.scrollWidth > width) { found.add("the page scrolls sideways"); }
  const scrolls = (element) => {
    for (let e = element; e; e = e.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(e).overflowX)) { return true; }
    }
    return false;
  };
  for (const element of document.querySelectorAll("body *")) {
    const box = element.getBoundingClientRect();
    if (box.width > 0 && (box.right > width + 0.5 || box.left < -0.5) && !scrolls(element)) {
      found.add(`${element.tagName} ${element.textContent.trim().slice(0, 60)}`);
    }
  }
  return [...found];
})()
"""
START_SECONDS, ANSWER_SECONDS = 90.0, 60.0  # 5 s and 1 s on an idle machine; tests run beside it


def find_chromium() -> str | None:
    """The path of a Chromium, or ``None``."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """A tab of the browser.

    Attributes:
        socket: to the tab.
        complaints: what the page wrote to its console as an error or a warning, and exceptions.
        requests: the addresses that it asked for, its own included; data URIs are none.
    """

    socket: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _last: int = 0
    _seen: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call the protocol and wait for the answer.

        Raises:
            RuntimeError: the browser says that it could not.
        """
        self._last += 1
        self.socket.send(json.dumps({"id": self._last, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=ANSWER_SECONDS))
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
            self._note(message)

    def _note(self, message: Mapping[str, Any]) -> None:
        name, params = message.get("method", ""), message.get("params", {})
        self._seen.append(name)
        if name == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if not address.startswith("data:"):
                self.requests.append(address)
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif name == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(params["args"]))

    def show(
        self,
        address: str,
        width: int = 1280,
        height: int = 900,
        scheme: Literal["light", "dark"] = "light",
    ) -> None:
        """Load an address in a window of this size, in CSS pixels, and wait until it is drawn."""
        self.resize(width, height)
        self.prefer(scheme)
        self._seen.clear()
        self.call("Page.navigate", url=address)
        end = time.monotonic() + ANSWER_SECONDS
        while "Page.loadEventFired" not in self._seen:
            if time.monotonic() > end:
                raise TimeoutError(f"{address} was not loaded in {ANSWER_SECONDS:.0f} s.")
            self._note(json.loads(self.socket.recv(timeout=ANSWER_SECONDS)))

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: Literal["light", "dark"]) -> None:
        """Ask pages for light or dark colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page, as JSON has it.

        Raises:
            RuntimeError: it raised an error.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def cut_off(self) -> list[str]:
        """What stands out of the window and cannot be scrolled to in a box of its own."""
        return list(self.evaluate(_CUT_OFF))

    def picture(self, full: bool = True) -> bytes:
        """A PNG file of the whole page, or of the window."""
        clip: dict[str, Any] = {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            height = min(size["height"], 16000)  # beyond that Chromium repeats the picture
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=full, **clip)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        """The page as it would be printed on A4."""
        answer = self.call("Page.printToPDF", preferCSSPageSize=False, paperWidth=8.27,
                           paperHeight=11.69, printBackground=True)  # fmt: skip
        return base64.b64decode(answer["data"])


@contextmanager
def browse(program: str | None = None) -> Iterator[Page]:
    """A browser with one tab, for as long as the context lasts.

    Raises:
        FileNotFoundError: there is no Chromium here.
        TimeoutError: it did not start; the message ends with the last lines that it wrote.
    """
    from websockets.sync.client import connect

    program = program or find_chromium()
    if program is None:
        raise FileNotFoundError(f"expected one of {NAMES} on the path, got none.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = Path(profile) / "stderr.txt"
        with words.open("wb") as stderr:
            process = subprocess.Popen(
                [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "HOME": profile},
            )
        try:
            browser = _wait_for_port(Path(profile) / "DevToolsActivePort", process, words)
            # The browser's own socket opens a tab; each tab has a socket by its id.
            with connect(f"ws://127.0.0.1:{browser[0]}{browser[1]}", max_size=None) as socket:
                target = Page(socket).call("Target.createTarget", url="about:blank")["targetId"]
            address = f"ws://127.0.0.1:{browser[0]}/devtools/page/{target}"
            with connect(address, max_size=None) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log", "Network"):
                    page.call(f"{domain}.enable")
                yield page
        finally:
            process.terminate()
            process.wait(timeout=10)


def _wait_for_port(file: Path, process: "subprocess.Popen[bytes]", words: Path) -> tuple[str, str]:
    """Port and path of the browser's socket, which it writes to ``file`` when it is ready."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if file.is_file() and len(lines := file.read_text().split()) == 2:
            return lines[0], lines[1]
        time.sleep(0.02)
    state = "is still starting" if process.poll() is None else f"ended with {process.returncode}"
    told = words.read_text(errors="replace")[-2000:] or "It wrote nothing."
    raise TimeoutError(
        f"Chromium {state} after {START_SECONDS:.0f} s or less, without a port to talk to. {told}"
    )
