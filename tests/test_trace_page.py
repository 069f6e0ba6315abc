"""The page of a trace: it stands alone, and a browser draws what the trace says."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from html import unescape

import numpy as np
import pytest
from recordings import recording, slow_step, span

from minidist.trace import write

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} is here")
WAITING = (0xE8, 0x59, 0x0C)

# What a user does, and what there is to see then.
SCRIPT = """
<script>
  const seen = {};
  const bars = () => +canvas.dataset.drawn, width = () => canvas.dataset.to - canvas.dataset.from;
  const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));
  const click = (what) => document.querySelector(`[data-do=${what}]`).click();
  const point = (type, x, y, more = {}) => {
    const box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new (type === "wheel" ? WheelEvent : PointerEvent)(
      type, { clientX: box.left + x, clientY: box.top + y, pointerId: 1, ...more }));
  };
  click("all");
  seen.all = { bars: bars(), width: width() };
  const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
  let waiting = 0;
  for (let i = 0; i < pixels.length; i += 4)
    waiting += pixels[i] === 0xe8 && pixels[i + 1] === 0x59 && pixels[i + 2] === 0x0c;
  seen.waiting = waiting;
  const lane = [...lanes.values()].find((each) => each.label === "replica 0 (cpu:0)");
  point("pointermove", x(61000), lane.y + 1.5 * ROW);
  seen.tip = tip.innerText;
  point("pointermove", x(50000), lane.y + 0.5 * ROW);
  seen.arrival = tip.innerText;
  point("wheel", 600, lane.y, { deltaY: -500 });
  seen.wheel = width();
  press("-"); seen.minus = width();
  press("+"); seen.plus = width();
  const from = +canvas.dataset.from;
  press("ArrowRight"); seen.right = canvas.dataset.from - from;
  for (const [type, at] of [["down", 500], ["move", 600], ["up", 600]])
    point(`pointer${type}`, at, lane.y);
  seen.dragged = canvas.dataset.from - from;
  press("0"); seen.zero = width();
  click("previous"); seen.step = [+canvas.dataset.from, +canvas.dataset.to];
  click("next"); seen.next = [+canvas.dataset.from, +canvas.dataset.to];
  seen.problems = problems;
  document.body.appendChild(document.createElement("pre")).id = "seen";
  document.getElementById("seen").textContent = JSON.stringify(seen);
</script>
"""
FIRST = """
<script>
  const problems = [];
  addEventListener("error", (event) => problems.push(event.message));
</script>
"""


def browse(path, *arguments):
    return subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--window-size=1400,1000", "--virtual-time-budget=2000"),
            *(f"--user-data-dir={path.parent / 'profile'}", *arguments, path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the page of two steps in which replica 1 is slow."""
    spans, ticks = slow_step()
    more_spans, more_ticks = slow_step(at=100, step=2)
    path = tmp_path_factory.mktemp("page") / "x.html"
    write(path, recording([*spans, *more_spans], [*ticks, *more_ticks]))
    return path


def test_the_page_needs_no_network(page):
    text = page.read_text()
    assert not re.search(r"https?:|src=|<link|@import|url\(|fetch\(|import\(", text)
    assert len(text) < 60_000


def test_what_names_hold_ends_no_script(tmp_path):
    name = "</script><b><!--<script>"
    write(tmp_path / "x.html", recording([span(0, "update", 0, 1, step=1, variables=[name])]))
    text = (tmp_path / "x.html").read_text()
    assert name not in text and text.count("</script>") == 2


@in_a_browser
def test_a_browser_draws_it_and_a_user_can_look_around(page):
    changed = page.with_name("used.html")
    text = page.read_text().replace("<!doctype html>", f"<!doctype html>{FIRST}", 1)
    changed.write_text(text.replace("</html>", f"{SCRIPT}</html>"))
    dom = browse(changed, "--dump-dom")
    seen = json.loads(unescape(re.search(r'<pre id="seen">(.*?)</pre>', dom, re.DOTALL)[1]))

    assert seen["problems"] == []
    assert seen["all"] == {"bars": 2 * 15, "width": 200_000}  # 14 by hand, and the last wait
    assert seen["waiting"] > 1000
    for line in ("waits for replica 1: 22.0 ms", "can do nothing until the other one is ready"):
        assert line in seen["tip"]
    assert "replica 0 (cpu:0), 50.0 ms after the step's beginning" in seen["tip"]
    assert "arrives at a meeting" in seen["arrival"]
    assert seen["wheel"] < 200_000 and seen["minus"] > seen["wheel"] > seen["plus"] - 1
    assert seen["right"] > 0 and seen["dragged"] < seen["right"]
    assert seen["zero"] == 200_000
    assert seen["step"][0] < 0 and 100_000 < seen["step"][1] < 110_000
    assert 90_000 < seen["next"][0] < 100_000 and seen["next"][1] > 200_000

    words = unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", dom, flags=re.DOTALL))
    assert "Replica 1 (cpu:1) was slow: in each step it needed 71.00 ms for its own work" in words
    assert re.search(r"replica 1 \(cpu:1\)\s+slow", words)
    assert not re.search(r"replica 0 \(cpu:0\)\s+slow", words)
    assert "waiting 17.00" in words and "waiting for another replica" in words


@in_a_browser
def test_a_screenshot_has_the_colour_of_waiting_in_it(page):
    picture = page.with_name("x.png")
    browse(page, f"--screenshot={picture}")
    pixels = decoded(picture.read_bytes())
    assert pixels.shape[:2] == (1000, 1400)
    waiting = (pixels[..., :3] == WAITING).all(axis=-1)
    assert waiting[:450].sum() > 500  # the bar of the average step
    assert waiting[450:].sum() > 500  # the timeline


def decoded(data):
    """Return the pixels of a PNG with 8 bits for each channel."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    channels = {2: 3, 6: 4}[colour]
    assert depth == 8
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    pixels = np.zeros((height + 1, width + 1, channels), np.int64)  # with a border of zeros
    for y, row in enumerate(rows, 1):
        line = row[1:].reshape(width, channels).astype(np.int64)
        if row[0] in (0, 2):
            pixels[y, 1:] = line + (pixels[y - 1, 1:] if row[0] == 2 else 0)
        elif row[0] == 1:
            pixels[y, 1:] = np.cumsum(line, axis=0)
        else:
            for x in range(1, width + 1):
                a, b, c = pixels[y, x - 1], pixels[y - 1, x], pixels[y - 1, x - 1]
                if row[0] == 3:
                    guess = (a + b) // 2
                else:
                    p = a + b - c
                    pa, pb, pc = abs(p - a), abs(p - b), abs(p - c)
                    guess = np.where((pa <= pb) & (pa <= pc), a, np.where(pb <= pc, b, c))
                pixels[y, x] = (line[x - 1] + guess) % 256
        pixels[y] %= 256
    return pixels[1:, 1:].astype(np.uint8)
