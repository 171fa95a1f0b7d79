"""The page of a timeline: exact lines, escaped text, nothing from outside, and a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

from recoup.memory import StepLine, Stretch, format_bytes
from recoup.memory.figures import check_page, page_of

NASTY = "</script><img src=x onerror=\"document.title='broken'\">&amp;'\u2028"
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
in_a_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"no browser is found: none of {', '.join(BROWSERS)} is installed"
)


def line(name="as it is", module="net.0", standing=0):
    forward = Stretch("forward", "forward", module, "keep", (100, 400, 300))
    loss = Stretch("forward", "loss", "-", "", (350,))
    again = Stretch("backward", "runs again", "net.1", "recompute", (500, 900))
    back = Stretch("backward", "backward", module, "keep", (200, 64))
    return StepLine(name, (forward, loss, again, back), standing)


def page(*lines, budget=None, plan="", title="Memory over a step of Net"):
    return page_of(title, "Peaks.", lines or (line(),), budget, plan)


def drawn(text, place=0):
    path = re.search(rf'id="line{place}" d="([^"]*)"', text)[1]
    unit = int(re.search(r'data-unit="(\d+)"', text)[1])
    return [(int(x), round(float(y) * unit)) for x, y in re.findall(r"H(\d+)V([-\d.e]+)", path)]


def test_a_line_has_the_bytes_of_its_stretches():
    found = line(standing=1000)
    assert found.levels("forward") == [1100, 1400, 1300, 1350]
    assert found.levels("backward") == [1500, 1900, 1200, 1064]
    starts = [(start, each.module) for start, each in found.starts("forward")]
    assert starts == [(0, "net.0"), (3, "-")]
    assert found.peak_bytes == 1900
    assert str(found.peak("backward")) == "1.855 KiB in net.1 (runs again)"
    assert StepLine("empty", ()).peak_bytes == 0
    assert StepLine("empty", ()).peak("forward") is None


def test_what_is_drawn_are_the_bytes_in_phases_equally_wide_for_all_lines():
    found = line()
    levels = [*found.levels("forward"), *found.levels("backward")]
    assert drawn(page(found)) == list(enumerate(levels))
    ran = Stretch("forward", "forward", "m", "keep", (7,))
    text = page(found, StepLine("planned", (ran, found.stretches[-1])))
    assert drawn(text, 1) == [(0, 7), (4, 200), (6, 64)]
    assert 'class="band" d="M4 0H8V' in text
    # Many gigabytes are exact, and within what browsers draw.
    levels = (3 * 2**36 + 7, 2**30 + 1, -513)
    text = page(StepLine("large", (Stretch("forward", "forward", "m", "keep", levels),)))
    assert [y for _, y in drawn(text)] == list(levels)
    assert float(re.search(r'viewBox="0 0 \d+ (\S+)"', text)[1]) < 2**31


def test_the_peaks_stand_in_a_table_and_at_the_lines():
    planned = line("planned", standing=0)
    text = page(line(standing=2**20), planned, budget=10**6)
    table = re.search(r"<table>.*</table>", text, re.DOTALL)[0]
    assert "1 MiB in net.1 (runs again)<br>1,049,476 bytes" in table
    assert "900 B in net.1 (runs again)<br>900 bytes" in table
    assert '<th scope="col">planned</th>' in table
    assert f">as it is {format_bytes(2**20 + 900)}</span>" in text
    assert ">planned 900 B</span>" in text
    assert ">budget 976.6 KiB</span>" in text
    assert 'class="budget"' in page(budget=1000)
    assert 'class="budget"' not in page(budget=2000), "it is far above the lines"


def test_a_page_escapes_names_loads_nothing_and_ends_in_html():
    text = page(line(NASTY, NASTY), plan=NASTY, title=NASTY)
    assert "<img" not in text
    assert text.count("</script>") == 2  # those of the page
    assert html.escape(NASTY) in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1]
    (found,) = json.loads(data)
    assert found["name"] == NASTY
    assert ["forward", NASTY, "keep"] in found["causes"]
    # The page needs nothing from outside.
    text = page(line(), line("planned"), budget=800, plan="a plan")
    assert "default-src 'none'" in text
    assert not re.findall(r"https?:|//[a-z]|url\(|@import|\bsrc=|\bhref=|<link", text)
    check_page(".HTML")
    with pytest.raises(ValueError, match=r'`path` of the page ends in ".png", but must end in'):
        check_page(".png")


def shown(tmp_path, text, *more):
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    arguments += [f"--user-data-dir={tmp_path / 'profile'}", *more, "--dump-dom", file.as_uri()]
    return subprocess.check_output([BROWSER, *arguments], text=True, timeout=60)


HOVER = """
const box = plot.getBoundingClientRect();
const seen = [];
const look = () => seen.push([...document.querySelectorAll(".card")].map((c) => c.innerText));
const point = (share) => plot.dispatchEvent(new PointerEvent("pointermove",
  { clientX: box.left + share * box.width, clientY: box.top + 5 }));
const places = () => [...plot.querySelectorAll(".cursor, .at")].map((e) => e.getAttribute("style"));
look();
point(5 / 8); look();
const moved = places();
point(1); look();
slider.value = 1; slider.dispatchEvent(new Event("input")); look();
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.body.replaceChildren(JSON.stringify({ seen, wide, moved, title: document.title,
  hidden: slider.hidden, spoken: slider.getAttribute("aria-valuetext") }));
"""


@in_a_browser
@pytest.mark.parametrize("width", [400, 1600])
def test_the_pointer_and_the_slider_tell_what_ran_in_any_window(tmp_path, width):
    text = page(line(), line("planned", NASTY, 10**6), budget=800, plan="x" * 300)
    text = text.replace("</body>", f"<script>{HOVER}</script></body>")
    document = shown(tmp_path, text, f"--window-size={width},900")
    found = json.loads(html.unescape(re.search(r"<body>(.*)</body>", document, re.DOTALL)[1]))
    assert found["wide"] == 0
    at_peak, pointed, ended, moved = found["seen"]
    assert at_peak[1].split("\n")[:2] == ["planned: 977.4 KiB (1,000,900 bytes)", "net.1"]
    assert pointed[0].split("\n")[:2] == ["as it is: 900 B (900 bytes)", "net.1"]
    assert pointed[0].endswith("runs again \u00b7 recompute \u00b7 allocates 400 B")
    assert ended[0].split("\n")[1:] == ["net.0", "backward \u00b7 keep \u00b7 frees 136 B"]
    assert moved[0].split("\n")[:2] == ["as it is: 400 B (400 bytes)", "net.0"]
    assert NASTY.replace("\u2028", "").strip() in moved[1].replace("\u2028", "").replace("\n", "")
    height = int(1.14 * 1_000_900)
    places = [f"left: 62.5%; bottom: {100 * y / height:.3f}" for y in (900, 1_000_900)]
    assert found["moved"][0] == "left: 62.5%;"
    for place, style in zip(places, found["moved"][1:], strict=True):
        assert style.startswith(place[:-2])
    assert found["title"] == "Memory over a step of Net"  # names run no code
    assert not found["hidden"]
    assert found["spoken"].startswith("as it is: 400 B, net.0, forward")
