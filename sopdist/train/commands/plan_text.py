"""The plan of a run as a table for people: section, what, how much, remark. Only turns numbers into text."""

from __future__ import annotations

from typing import Any

from ..forecast import Traffic

Row = tuple[str, str, str, str]  # section, what, how much, remark

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def as_text(plan: dict[str, Any]) -> str:
    """The plan as an aligned table: section, what, how much, remark."""
    lines = [row for rows in (_work_rows, _table_rows, _course_rows, _network_rows) for row in rows(plan)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = [f"plan of {plan['run']} on {_ranks(plan['world_size'])}, sizes from {plan['source']}", ""]
    section = None
    for line in lines:
        shown = "" if line[0] == section else line[0]
        section = line[0]
        cells = (shown.ljust(widths[0]), line[1].ljust(widths[1]), line[2].rjust(widths[2]), line[3])
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _work_rows(plan: dict[str, Any]) -> list[Row]:
    data, steps = plan["data"], plan["steps"]
    stored = "" if data["shards"] is None else f"{data['shards']:,} shards, {_size(data['shard_bytes'])}"
    rows = [("data", "samples", f"{data['samples']:,}", stored), ("data", "classes", f"{data['classes']:,}", "")]
    if data["epoch_samples"] != data["samples"]:
        rows.append(("data", "samples an epoch", f"{data['epoch_samples']:,}", "data.balanced_per_epoch"))
    rows += [
        ("steps", "an epoch", f"{steps['epoch']:,}", f"the last one with {steps['last']:,} samples"),
        ("steps", "in all", f"{steps['total']:,}", f"{steps['epochs']:,.4g} epochs"),
    ]
    for share in plan["shares"]:
        uneven = "the batch cannot be divided evenly: " if len(plan["shares"]) > 1 else ""
        pieces = f", {share['piece']:,} at a time" if share["piece"] != share["samples"] else ""
        rows.append(
            ("steps", "samples of a rank a step", f"{share['samples']:,}", f"{uneven}{_ranks(share['ranks'])}{pieces}")
        )
    return rows


def _table_rows(plan: dict[str, Any]) -> list[Row]:
    table, traffic, activation = plan["table"], plan["exchange"], plan["activation"]
    if table is None:
        return [("table", "noise table", "none", "plain cross-entropy keeps none")]
    rows = [
        ("table", "layout", table["layout"], f"{table['row_bytes']:,} bytes a row"),
        ("table", "in all", _size(table["nbytes"]), ""),
        ("table", "of a rank", _size(table["rank_bytes"]), "at most"),
    ]
    if traffic is None:
        rows.append(("exchange", "bytes", "0", "one rank owns every row"))
    else:
        rows += _traffic_rows(Traffic(**traffic))
    visits = "never" if activation["visits"] is None else f"{activation['visits']:,.4g}"
    rows.append(("noise", "visits to activation", visits, f"{activation['planned']:,.4g} are planned for a sample"))
    rows.append(("noise", "table can act", "yes" if activation["activates"] else "NO", activation["advice"]))
    return rows


def _traffic_rows(traffic: Traffic) -> list[Row]:
    sample = traffic.row_bytes + traffic.fact_bytes
    ratio = 1 / traffic.of_dense
    dense = f"1/{ratio:,.1f}" if ratio > 1 else f"{traffic.of_dense:.2f}"
    return [
        ("exchange", "samples that travel", f"{traffic.travelling:.1%}", "those whose row another rank owns"),
        ("exchange", "bytes of such a sample", f"{sample:,}", f"row {traffic.row_bytes:,}, facts {traffic.fact_bytes}"),
        ("exchange", "a step, all ranks", _size(traffic.step_bytes), "there and back, in the mean"),
        ("exchange", "a step, sent by a rank", _size(traffic.rank_bytes), "in the mean"),
        ("exchange", "of dense rows both ways", dense, ""),
    ]


def _course_rows(plan: dict[str, Any]) -> list[Row]:
    rows = [
        ("learning rate", f"step {rate['step']:,}", f"{rate['lr']:.4g}", rate["event"])
        for rate in plan["learning_rate"]
    ]
    for split in plan["evaluation"]:
        known = split["samples"] is not None
        size = f"{split['samples']:,}" if known else "?"
        rows.append(("evaluation", split["name"], size, f"samples, {split['steps']:,} steps" if known else "no shards"))
    return rows if plan["evaluation"] else [*rows, ("evaluation", "splits", "none", "")]


def _network_rows(plan: dict[str, Any]) -> list[Row]:
    network, engine, checkpoint = plan["network"], plan["engine"], plan["checkpoint"]
    if network is None:
        return [("network", "size", "?", plan["network_problem"])]
    frozen = "" if network["trained"] == network["parameters"] else f", {network['trained']:,} of them trained"
    return [
        ("network", "parameters", f"{network['parameters']:,}", f"{network['name']}{frozen}"),
        ("network", "bytes", _size(network["nbytes"]), "float32, with buffers"),
        ("memory of a rank", "weights", _size(engine["weights"]), engine["name"]),
        ("memory of a rank", "gradients", _size(engine["gradients"]), ""),
        ("memory of a rank", "optimizer", _size(engine["optimizer"]), ""),
        ("memory of a rank", "together", _size(engine["bytes"]), "activations and communication come on top"),
        ("disk", "a checkpoint", _size(checkpoint["bytes"]), "network, optimizer, noise table"),
        (
            "disk",
            "at most at a time",
            _size(checkpoint["kept_bytes"]),
            "checkpoint.keep, the best, one being written; the best and the last network",
        ),
    ]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"


def _size(nbytes: float) -> str:
    unit = 0
    while nbytes >= 1024 and unit < len(_UNITS) - 1:
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:,.0f} {_UNITS[unit]}" if unit == 0 else f"{nbytes:,.2f} {_UNITS[unit]}"
