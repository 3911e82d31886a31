"""Pages in headless Chromium: copies of them in frames of several widths, and what a script in each copy sees."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
WIDTHS = (390, 768, 1280)
SCHEMES = ("light", "dark")
HEIGHT = 900
LIMIT_S = 120.0
SWITCHES = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--allow-file-access-from-files",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
    "--dump-dom",
)
FIRST = """
const errors = [], pasted = [];
const noted = console.error;
console.error = (...said) => { errors.push(said.join(" ")); noted(...said); };
addEventListener("error", (event) => errors.push(String(event.message || event.target.tagName)), true);
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective + " " + event.blockedURI));
const clipboard = {writeText: (text) => { pasted.push(text); return Promise.resolve(); }};
Object.defineProperty(navigator, "clipboard", {value: clipboard});
"""
LAST = """
{
const root = document.documentElement, banner = document.querySelector(".banner");
const is_cut = (each) => each.checkVisibility() && each.scrollWidth > each.clientWidth;
const cut = () => [...document.querySelectorAll(".wide")].filter(is_cut).map((each) => each.closest("section").id);
const box = banner.getBoundingClientRect(), button = document.querySelector(".copy");
const seen = {
  width: innerWidth, wanted: root.scrollWidth, cut: cut(), copied: null, errors,
  banner: [box.top, box.bottom, box.width], verdict: banner.textContent.trim().slice(0, 9).trim(),
  matrix_bottom: (document.querySelector(".cells") || banner).getBoundingClientRect().bottom,
  is_dark: matchMedia("(prefers-color-scheme: dark)").matches,
  background: getComputedStyle(document.body).backgroundColor,
};
for (const each of document.querySelectorAll("details")) each.open = true;
seen.wanted_unfolded = root.scrollWidth;
if (button) { button.click(); seen.line = button.parentElement.querySelector("code").textContent; }
setTimeout(() => {
  seen.copied = pasted.length ? pasted[0] : null;
  seen.button = button && button.textContent;
  seen.requests = performance.getEntriesByType("resource").map((each) => each.name);
  parent.postMessage(JSON.stringify([name, seen]), "*");
}, 200);
}
"""
HARNESS = """<!doctype html><meta charset="utf-8"><body><script type="text/plain" id="said"></script>
<script>const said = [];
addEventListener("message", (event) => { said.push(JSON.parse(event.data));
document.getElementById("said").textContent = JSON.stringify(said).replaceAll("<", "\\\\u003c"); });</script>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What the browser made of the pages. seen: by page, width and scheme. console: what it logged of pages."""

    seen: Mapping[tuple[str, int, str], dict[str, Any]]
    console: tuple[str, ...]


def open_pages(pages: Mapping[str, str], folder: Path) -> Opened:
    wanted = [(name, width, scheme) for name in pages for width in WIDTHS for scheme in SCHEMES]
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(with_script(text), encoding="utf-8")
    frames = "".join(
        f'<iframe name="{html.escape(json.dumps([name, width, scheme]))}" src="{name}.html" width="{width}"'
        f' height="{HEIGHT}" style="border:0;color-scheme:{scheme}"></iframe>'
        for name, width, scheme in wanted
    )
    harness = folder / "harness.html"
    # The listener has to be there before a frame can speak, so the frames come after it.
    harness.write_text(HARNESS + frames, encoding="utf-8")
    dumped, logged = _run(harness, folder / "profile")
    found = re.search(r'<script type="text/plain" id="said">(.*?)</script>', dumped, re.DOTALL)
    assert found is not None and found[1], f"no page spoke; the browser said: {logged[-2000:]}"
    seen = {tuple(json.loads(frame)): facts for frame, facts in json.loads(found[1])}
    assert set(seen) == set(wanted), f"these did not speak: {set(wanted) - set(seen)}"
    return Opened(seen=seen, console=tuple(line for line in logged.splitlines() if ":CONSOLE" in line))


def with_script(page: str) -> str:
    """The page with the two scripts, which its policy allows by hash."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in (FIRST, LAST)]
    policy = re.search(r'(http-equiv="Content-Security-Policy" content=")([^"]*)"', page)
    assert policy is not None, "each page states its policy"
    rules = html.unescape(policy[2])
    before = rules if "script-src" in rules else f"{rules}; script-src"
    allowed = html.escape(before.replace("script-src", f"script-src {' '.join(hashes)}"))
    page = page.replace(policy[0], f'{policy[1]}{allowed}"').replace("<title>", f"<script>{FIRST}</script><title>", 1)
    start, end = page.rsplit("</body>", 1)
    return f"{start}<script>{LAST}</script></body>{end}"


def _run(page: Path, profile: Path) -> tuple[str, str]:
    """What it printed and what it logged. All its processes are ended when the time is over."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *SWITCHES, f"--user-data-dir={profile}", "--window-size=1400,900", page.as_uri()]
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"HOME": str(profile.parent)},
        start_new_session=True,
    )
    try:
        return child.communicate(timeout=LIMIT_S)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
