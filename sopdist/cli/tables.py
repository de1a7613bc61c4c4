"""Text tables for the terminal and tables in Markdown, as used by all commands."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def format_table(header: Sequence[str] | None, rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Format rows as a text table, with a rule below the header; without a header there is no rule.

    Columns whose index is in `left` are left-aligned, all others are right-aligned.
    """
    if header is None:
        return "\n".join(align(rows, left))
    rule = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(align([header, rule, *rows], left))


def align(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Pad the cells of each column to the same width; returns one line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))
