"""Check that every link within the built site leads to a page, and to a place on it.

Sphinx checks the links that it resolves itself. This reads what a browser will read: every
address of every page, also of pictures, of raw HTML and of what the theme adds.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit


class Page(HTMLParser):
    """The addresses that a page links to, and the places on it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append(value)
            elif name == "id" or (tag == "a" and name == "name"):
                self.places.add(value or "")


def dead_links(root: Path) -> list[str]:
    """Return one line for each link within `root` that leads nowhere."""
    pages = {
        path.resolve(): Page(path.read_text(encoding="utf-8")) for path in root.rglob("*.html")
    }
    dead = []
    for path, page in pages.items():
        for link in sorted(set(page.links)):
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            address, place = urldefrag(link)
            address = unquote(urlsplit(address).path)
            target = (path.parent / address).resolve() if address else path
            found = target in pages and unquote(place) in pages[target].places
            if not found and (target in pages or not target.exists()):
                dead.append(f"{path.relative_to(root.resolve())}: {link}")
    return dead


if __name__ == "__main__":
    lines = dead_links(Path(sys.argv[1]))
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(f"{len(lines)} links lead nowhere" if lines else 0)
