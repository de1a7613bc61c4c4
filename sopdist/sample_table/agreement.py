"""Checks that all ranks build a table in the same way; otherwise the first exchange would abort inside gloo or NCCL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def check_same_on_all_ranks(group: dist.ProcessGroup, what: str, arguments: Mapping[str, Any]) -> None:
    """Compare the arguments with which every rank builds `what`. Collective; ValueError on every rank if any differ.

    For example, rank 0 with {"num_classes": 10} and rank 1 with {"num_classes": 12}: both raise "SOP must be built with
    the same arguments on every rank: num_classes is 10 on rank 0 and 12 on rank 1".
    """
    everyone = _gather(json.dumps(arguments, sort_keys=True, default=str), group)
    first = json.loads(everyone[0])
    for rank, text in enumerate(everyone[1:], 1):
        other = json.loads(text)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                values = f"{name} is {first.get(name)} on rank 0 and {other.get(name)} on rank {rank}"
                raise ValueError(f"{what} must be built with the same arguments on every rank: {values}")


def _gather(text: str, group: dist.ProcessGroup) -> list[str]:
    """The text of every rank, in the order of ranks."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"  # NCCL moves nothing else
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(content)], device=device), group=group)
    longest = int(max(lengths))
    padded = torch.nn.functional.pad(content, (0, longest - len(content)))
    texts: list[Tensor] = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded, group=group)
    return [bytes(text[: int(length)].tolist()).decode() for text, length in zip(texts, lengths, strict=True)]
