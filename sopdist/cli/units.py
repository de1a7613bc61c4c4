"""Sizes and counts as text."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_bytes(count: float) -> str:
    """Format a number of bytes with binary units: `12 bytes`, `1.50 MiB`."""
    if count < 1023.5:
        return f"{count:,.0f} byte{'' if round(count) == 1 else 's'}"
    size, unit = count / 1024, 0
    while size >= 1023.995 and unit + 1 < len(_UNITS):  # would be shown as 1024.00
        size, unit = size / 1024, unit + 1
    return f"{size:,.2f} {_UNITS[unit]}"


def pluralize(count: int, noun: str) -> str:
    """Format a count with its noun: `1 file`, `2 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
