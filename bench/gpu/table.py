"""The check's table, for a terminal and as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from stage import Outcome

HEADINGS = ["stage", "result", "seconds", ""]


def row_of(name: str, outcome: Outcome) -> list[str]:
    """A stage's cells.

    Args:
        name: of the stage.
        outcome: what came of it.
    """
    return [name, outcome.verdict.value, f"{outcome.seconds:.1f}", outcome.note]


def line_of(row: Sequence[str], widths: Sequence[int] = (12, 9, 7)) -> str:
    """A row for a terminal, under those of other stages.

    Args:
        row: the cells.
        widths: of all cells but the last.
    """
    cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
    return "  ".join([*cells, *row[len(widths) :]]).rstrip()


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines in which columns stand under each other.

    Args:
        rows: the first one has the headings.
    """
    columns = max((len(row) for row in rows), default=0)
    widths = [max(len(row[c]) if c < len(row) else 0 for row in rows) for c in range(columns)]
    return [line_of(row, widths) for row in rows]


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in markdown.

    Args:
        rows: the first one has the headings.
    """

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(rows[0]), line(["---"] * len(rows[0])), *(line(row) for row in rows[1:])]


def document(title: str, facts: Sequence[str], results: Sequence[tuple[str, Outcome]]) -> str:
    """All results as a page of markdown.

    Args:
        title: its heading.
        facts: lines that say where this was.
        results: stages by name, in order.
    """
    lines = [f"# {title}", "", *(f"- {fact}" for fact in facts), ""]
    lines += markdown([HEADINGS, *(row_of(name, outcome) for name, outcome in results)])
    for name, outcome in results:
        if outcome.rows:
            lines += ["", f"## {name}", "", *markdown(outcome.rows)]
    return "\n".join(lines) + "\n"
