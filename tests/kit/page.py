"""An HTML page taken apart: its tags must balance, and nothing in it may fetch or run anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

EMPTY = {"meta", "link", "br", "hr", "img", "input", "path", "use", "rect", "circle", "line"}  # path ...: also <path/>
FETCHING = ("src", "href", "xlink:href", "action", "data", "poster", "srcset")


@dataclass
class Page:
    """Text as people read it, ids, headings, and what would be fetched or run."""

    text: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    headings: list[tuple[int, str]] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    run: list[str] = field(default_factory=list)
    unbalanced: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    described: list[bool] = field(default_factory=list)  # of each <svg>: whether it has a title and a description


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page, self.open = Page(), list[str]()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, attrs)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, attrs)
        if tag not in EMPTY:
            self.open.append(tag)

    def _look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag in ("script", "iframe", "object", "embed", "form"):
            self.page.run.append(tag)
        self.page.run += [f"{tag} {name}" for name in given if name.startswith("on")]
        for name in FETCHING:
            value = given.get(name, "")
            if value.startswith("#"):
                self.page.links.append(value[1:])
            elif value and not value.startswith("data:,"):
                self.page.fetched.append(value)
        if "id" in given:
            self.page.ids.append(given["id"])
        if tag == "svg":
            self.page.described.append(given.get("role") == "img" and bool(given.get("aria-labelledby")))

    def handle_endtag(self, tag: str) -> None:
        if tag in EMPTY:
            return
        if not self.open or self.open.pop() != tag:
            self.page.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        words = " ".join(data.split())
        if not words or "style" in self.open:
            return
        self.page.text.append(words)
        for tag in self.open:
            if tag in ("h1", "h2", "h3"):
                self.page.headings.append((int(tag[1]), words))


def read(html: str) -> Page:
    """Take a page apart."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    reader.page.unbalanced += reader.open
    return reader.page
