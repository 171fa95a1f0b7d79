"""What is checked of the built site, by `docs/check_links.py`, finds links that lead nowhere."""

from __future__ import annotations

import runpy
from pathlib import Path

CHECK = Path(__file__).parents[2] / "docs" / "check_links.py"
dead_links = runpy.run_path(str(CHECK))["dead_links"]


def test_links_that_lead_nowhere(tmp_path):
    (tmp_path / "api").mkdir()
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "api" / "plans.html").write_text('<h1 id="plans">Plans</h1><a href="../no.html">')
    (tmp_path / "index.html").write_text(
        '<a href="api/plans.html#plans"><a href="#">'
        '<a href="https://elsewhere.org/no.html"><img src="picture.png">'
        '<a href="api/plans.html#none"><img src="none.png"><a href="#nowhere">'
    )
    assert sorted(dead_links(tmp_path)) == [
        "api/plans.html: ../no.html",
        "index.html: #nowhere",
        "index.html: api/plans.html#none",
        "index.html: none.png",
    ]
