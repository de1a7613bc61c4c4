"""The plan of a run as a table for the terminal: section, quantity, value, remark."""

from __future__ import annotations

from typing import Any

from ...train.forecast import Traffic
from ..tables import format_table
from ..units import format_bytes

Row = tuple[str, str, str, str]  # section, quantity, value, remark


def as_text(plan: dict[str, Any]) -> str:
    """The plan as an aligned table."""
    lines = [row for rows in (_work_rows, _method_rows, _schedule_rows, _network_rows) for row in rows(plan)]
    sections = ["", *(section for section, *_ in lines)]
    rows = [("" if line[0] == before else line[0], *line[1:]) for before, line in zip(sections, lines, strict=False)]
    title = f"plan of {plan['run']} on {_ranks(plan['world_size'])}, sizes from {plan['source']}"
    return f"{title}\n\n{format_table(None, rows, left=(0, 1, 3))}"


def _work_rows(plan: dict[str, Any]) -> list[Row]:
    data, steps = plan["data"], plan["steps"]
    stored = "" if data["shards"] is None else f"{data['shards']:,} shards, {format_bytes(data['shard_bytes'])}"
    rows = [("data", "samples", f"{data['samples']:,}", stored), ("data", "classes", f"{data['classes']:,}", "")]
    if data["epoch_samples"] != data["samples"]:
        rows.append(("data", "samples per epoch", f"{data['epoch_samples']:,}", "data.balanced_per_epoch"))
    rows += [
        ("steps", "per epoch", f"{steps['epoch']:,}", _about_epochs(plan)),
        ("steps", "total", f"{steps['total']:,}", f"{steps['epochs']:,.4g} epochs"),
    ]
    for share in plan["shares"]:
        uneven = "the batch cannot be split evenly: " if len(plan["shares"]) > 1 else ""
        split = f", {share['micro_batch']:,} at a time" if share["micro_batch"] != share["samples"] else ""
        rows.append(
            ("steps", "samples per rank", f"{share['samples']:,}", f"per step; {uneven}{_ranks(share['ranks'])}{split}")
        )
    return rows


def _about_epochs(plan: dict[str, Any]) -> str:
    if plan["steps"]["leading"] != plan["batch"]:
        return "at most: fewer in epochs with larger or fewer batches"
    return f"the last one with {plan['steps']['last']:,} samples"


def _method_rows(plan: dict[str, Any]) -> list[Row]:
    method, traffic, outlook = plan["method"], plan["exchange"], plan["outlook"]
    passes = method["forward_passes"]
    rows = [("method", "name", method["name"], f"{passes} forward {'pass' if passes == 1 else 'passes'} per sample")]
    for table in plan["tables"]:
        rows += [
            (f"{table['name']} table", "layout", table["layout"], f"{table['row_bytes']:,} bytes per row"),
            (f"{table['name']} table", "total", format_bytes(table["nbytes"]), ""),
            (f"{table['name']} table", "per rank", format_bytes(table["rank_bytes"]), "at most"),
        ]
    if traffic is not None:
        rows += _traffic_rows(Traffic(**traffic))
    elif plan["tables"]:
        rows.append(("exchange", "bytes", "0", "one rank owns every row"))
    if outlook is not None:
        visits = "never" if outlook["visits"] is None else f"{outlook['visits']:,.4g}"
        planned = f"{outlook['planned']:,.4g} planned per sample"
        rows.append(("method", "visits until the table can act", visits, planned))
        rows.append(
            ("method", "can act", "yes" if outlook["works"] else "NO", "" if outlook["works"] else outlook["text"])
        )
    else:
        rows += [] if plan["tables"] else [("method", "sample tables", "none", "")]
    return rows


def _traffic_rows(traffic: Traffic) -> list[Row]:
    sample = traffic.row_bytes + traffic.fact_bytes
    ratio = 1 / traffic.of_dense
    dense = f"1/{ratio:,.1f}" if ratio > 1 else f"{traffic.of_dense:.2f}"
    return [
        ("exchange", "samples exchanged", f"{traffic.travelling:.1%}", "those whose row another rank owns"),
        ("exchange", "bytes per such sample", f"{sample:,}", f"row {traffic.row_bytes:,}, facts {traffic.fact_bytes}"),
        ("exchange", "per step, all ranks", format_bytes(traffic.step_bytes), "both ways, on average"),
        ("exchange", "per step, sent by a rank", format_bytes(traffic.rank_bytes), "on average"),
        ("exchange", "relative to dense rows", dense, ""),
    ]


def _schedule_rows(plan: dict[str, Any]) -> list[Row]:
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
        ("network", "bytes", format_bytes(network["nbytes"]), "float32, with buffers"),
        ("memory per rank", "weights", format_bytes(engine["weights"]), engine["name"]),
        ("memory per rank", "gradients", format_bytes(engine["gradients"]), ""),
        ("memory per rank", "optimizer", format_bytes(engine["optimizer"]), ""),
        ("memory per rank", "total", format_bytes(engine["bytes"]), "without activations and communication buffers"),
        ("disk", "per checkpoint", format_bytes(checkpoint["bytes"]), "network, optimizer, sample tables"),
        (
            "disk",
            "maximum",
            format_bytes(checkpoint["kept_bytes"]),
            "checkpoint.keep, the best, the one being written; the best and the last network",
        ),
    ]


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count:,} ranks"
