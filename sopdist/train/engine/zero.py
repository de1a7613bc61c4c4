"""Weights and optimizer state that DeepSpeed partitions (ZeRO 1 to 3): read as fragments, set from full tensors.

Knows how DeepSpeed lays out its partitions. Independent of files and training steps. Full tensors do not depend on the
number of ranks, so a run can resume on any number of ranks and with any engine. All functions except `own_fragments`
are collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...checkpoint.fragments import Fragment
from ...errors import DataError
from .base import STEP


def gather_weights(network: nn.Module) -> dict[str, Tensor]:
    """Full parameters under ZeRO-3, on the CPU. Gathered one by one: the full network is never on the device."""
    import deepspeed

    weights = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def set_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Under ZeRO-3: rank 0 fills in each full parameter, every rank keeps its partition.

    Call `refresh_master_weights` afterwards.
    """
    import deepspeed

    for name, parameter in network.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if parameter.numel() > 0:  # gathered here; it may be empty on ranks other than 0
                parameter.copy_(weights[name])


def refresh_master_weights(engine: Any) -> None:
    """Copy the network's weights to the master weights that ZeRO updates."""
    engine.optimizer.refresh_fp32_params()


def own_fragments(engine: Any, network: nn.Module) -> tuple[dict[str, Fragment], dict[str, Fragment]]:
    """Fragments that only this rank holds: weights (ZeRO-3) as `NAME`, optimizer state as `NAME/KEY`.

    Views, not copies.
    """
    if engine.zero_optimization_stage() < 3:
        return {}, _flat_fragments(engine, network)
    return _partition_fragments(engine, network)


def _flat_fragments(engine: Any, network: nn.Module) -> dict[str, Fragment]:
    """ZeRO 1 and 2: all parameters are concatenated and split into one part per rank."""
    zero = engine.optimizer
    fragments = {}
    for name, parameter in _trained(network):
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            continue
        start, shape = mapping.lp_fragment_address.start, tuple(parameter.shape)
        for key, values in (mapping.optim_fragment or {}).items():
            fragments[f"{name}/{key}"] = Fragment(values.detach(), start, shape)
        if start == 0:
            fragments |= _step_count(zero, _flat_partitions(zero, 1)[mapping.param_group_index], name)
    return fragments


def _partition_fragments(engine: Any, network: nn.Module) -> tuple[dict[str, Fragment], dict[str, Fragment]]:
    """ZeRO 3: each parameter is split into one part per rank, padded with zeros at the end."""
    from deepspeed.utils import safe_get_local_optimizer_state

    zero = engine.optimizer
    flat = _flat_partitions(zero, 3)[0]
    kept = {key: value for key, value in zero.optimizer.state.get(flat, {}).items() if torch.is_tensor(value)}
    trained = {name for name, _ in _trained(network)}  # a weight with two names counts under the first
    weights: dict[str, Fragment] = {}
    optimizer: dict[str, Fragment] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        partition, shape = parameter.ds_tensor, tuple(parameter.ds_shape)  # type: ignore[attr-defined]
        start = partition.ds_numel * torch.distributed.get_rank()
        count = min(partition.ds_numel, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if count <= 0:
            continue
        weights[name] = Fragment(partition.detach().flatten()[:count], start, shape)
        if name not in trained:
            continue
        for key in (key for key, value in kept.items() if value.shape == flat.shape):
            values = safe_get_local_optimizer_state(parameter, key)
            optimizer[f"{name}/{key}"] = Fragment(values.detach().flatten()[:count], start, shape)
        if start == 0:
            optimizer |= _step_count(zero, flat, name)
    return weights, optimizer


def _step_count(zero: Any, flat: Tensor, name: str) -> dict[str, Fragment]:
    """Adam's step count, which is the same for all parameters."""
    kept = zero.optimizer.state.get(flat, {})
    return {
        f"{name}/{key}": Fragment.full(value) for key, value in kept.items() if key == STEP and torch.is_tensor(value)
    }


def set_optimizer_state(engine: Any, network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Set full `NAME/KEY` tensors. All parameters must have the same keys: a partition holds parts of several."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    trained = _trained(network)
    shared, elementwise = _keys(state, trained)
    for partition in _flat_partitions(zero, stage):
        zero.optimizer.state[partition] = {
            **{key: value.clone() for key, value in shared.items()},
            **{key: torch.zeros_like(partition) for key in elementwise},
        }
    if stage < 3:  # make the parameters' views into these tensors, which DeepSpeed otherwise makes in the first step
        zero._hp_optimizer_states_linked = False
        if elementwise:  # DeepSpeed links them only once: with nothing to link yet, leave it to the first step
            zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in trained:
        for key in elementwise:
            value = state[f"{name}/{key}"].to(engine.device, torch.float32).contiguous()
            if stage < 3:
                safe_set_full_optimizer_state(parameter, value, key)
            else:
                safe_set_local_optimizer_state(parameter, _own_partition(engine, parameter, value), key)


def _own_partition(engine: Any, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part of a full tensor under ZeRO-3: equal parts, padded with zeros at the end.

    DeepSpeed's own function reads past the end if the number of ranks does not divide the number of elements.
    """
    count: int = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
    padded = value.new_zeros(count * engine.dp_world_size)
    padded[: value.numel()] = value.flatten()
    return padded.narrow(0, count * torch.distributed.get_rank(), count)


def _keys(state: Mapping[str, Tensor], trained: list[tuple[str, nn.Parameter]]) -> tuple[dict[str, Tensor], list[str]]:
    """The scalars that all parameters share (Adam's step), and the keys of tensors with their parameter's shape."""
    keys = sorted({entry.rpartition("/")[2] for entry in state})
    for name, _ in trained:
        for key in keys:
            if f"{name}/{key}" not in state:
                raise DataError(f"optimizer state: {name} has no {key}, but other parameters have one")
    first = trained[0][0]
    shared = {key: state[f"{first}/{key}"] for key in keys if key == STEP}
    return shared, [key for key in keys if key not in shared]


def _flat_partitions(zero: Any, stage: int) -> list[Tensor]:
    """The flat tensors that this rank's optimizer updates."""
    return list(zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)


def _trained(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
