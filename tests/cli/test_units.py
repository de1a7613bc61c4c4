"""Sizes and counts are readable, and never show 1024 of a unit."""

from __future__ import annotations

from sopdist.cli.units import format_bytes, pluralize


def test_sizes_are_readable() -> None:
    assert [format_bytes(size) for size in (0, 1, 12, 999, 1000, 1_234_567, 5 * 10**12)] == [
        "0 bytes", "1 byte", "12 bytes", "999 bytes", "1,000 bytes", "1.18 MiB", "4.55 TiB",
    ]  # fmt: skip
    assert format_bytes(1.5 * 2**20) == "1.50 MiB"
    assert format_bytes(7.4) == "7 bytes"


def test_sizes_switch_units_where_rounding_would_show_1024() -> None:
    assert [format_bytes(size) for size in (1023, 1023.6, 1024, 2**20 - 6, 2**20 - 5, 2**30 - 1)] == [
        "1,023 bytes", "1.00 KiB", "1.00 KiB", "1,023.99 KiB", "1.00 MiB", "1.00 GiB",
    ]  # fmt: skip
    assert format_bytes(5000 * 2**40) == "5,000.00 TiB"


def test_counts_agree_with_their_nouns() -> None:
    assert [pluralize(count, "file") for count in (0, 1, 2, 1234)] == ["0 files", "1 file", "2 files", "1,234 files"]
