"""Tables of Markdown, and the part of a page between two marks that a program writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Marks:
    """begin, end: lines of the page."""

    begin: str
    end: str

    def with_section(self, page: str, section: str) -> str:
        """The page with what stands between the marks replaced. ValueError without them."""
        before, found, rest = page.partition(self.begin)
        _, ended, after = rest.partition(self.end)
        if not found or not ended:
            raise ValueError(
                f"the page has no {self.begin!r} followed by {self.end!r}; add both where the section belongs"
            )
        return f"{before}{self.begin}\n\n{section}\n{self.end}{after}"

    def write(self, section: str, page: Path | None) -> None:
        """Print the section, or put it into the page."""
        if page is None:
            print(section)
        else:
            page.write_text(self.with_section(page.read_text(encoding="utf-8"), section), encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Empty without rows."""
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
