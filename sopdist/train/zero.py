"""Weights and optimizer state that DeepSpeed has cut into pieces (ZeRO 1 to 3), as pieces, as whole tensors and back.

Knows how DeepSpeed lays out its pieces, and nothing of files or steps. Whole tensors do not depend on the number of
ranks, so that what one run saved another continues, at any number of ranks and with any engine. All functions but
`own_pieces` are collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.pieces import Piece
from ..data.errors import DataError

COUNT = "step"  # what torch's optimizers keep of a parameter that is one number, whatever the parameter's shape


def whole_weights(network: nn.Module) -> dict[str, Tensor]:
    """The parameters under ZeRO-3, one by one, so that at no time the whole network is on the device."""
    import deepspeed

    weights = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter]):
            weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def set_whole_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Under ZeRO-3: rank 0 fills in each parameter, and every rank keeps its piece. `renew_masters` must follow."""
    import deepspeed

    for name, parameter in network.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if parameter.numel() > 0:  # whole, that is; on other ranks it may stay away
                parameter.copy_(weights[name])


def renew_masters(engine: Any) -> None:
    """ZeRO updates copies of the weights of its own: make them those of the network."""
    engine.optimizer.refresh_fp32_params()


def own_pieces(engine: Any, network: nn.Module) -> dict[str, Piece]:
    """What this rank alone has: `optimizer/NAME/KEY`, and under ZeRO-3 `network/NAME`. Views, not copies."""
    if engine.zero_optimization_stage() < 3:
        return _own_fragments(engine, network)
    return _own_partitions(engine, network)


def _own_fragments(engine: Any, network: nn.Module) -> dict[str, Piece]:
    """ZeRO 1 and 2: all parameters in a row are cut into as many parts as there are ranks."""
    zero = engine.optimizer
    pieces = {}
    for name, parameter in _trained(network):
        here = parameter._hp_mapping  # type: ignore[attr-defined]
        if here is None:
            continue
        start, shape = here.lp_fragment_address.start, tuple(parameter.shape)
        for key, values in (here.optim_fragment or {}).items():
            pieces[f"optimizer/{name}/{key}"] = Piece(values.detach(), start, shape)
        if start == 0:
            pieces |= _numbers(zero, _pieces(zero, 1)[here.param_group_index], name)
    return pieces


def _own_partitions(engine: Any, network: nn.Module) -> dict[str, Piece]:
    """ZeRO 3: each parameter is cut into as many parts as there are ranks, the last ones filled up with zeros."""
    from deepspeed.utils import safe_get_local_optimizer_state

    zero = engine.optimizer
    flat = _pieces(zero, 3)[0]
    kept = {key: value for key, value in zero.optimizer.state.get(flat, {}).items() if torch.is_tensor(value)}
    trained = {name for name, _ in _trained(network)}  # of a weight with two names, the first
    pieces = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        partition, shape = parameter.ds_tensor, tuple(parameter.ds_shape)  # type: ignore[attr-defined]
        start = partition.ds_numel * torch.distributed.get_rank()
        count = min(partition.ds_numel, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if count <= 0:
            continue
        pieces[f"network/{name}"] = Piece(partition.detach().flatten()[:count], start, shape)
        if name not in trained:
            continue
        for key in (key for key, value in kept.items() if value.shape == flat.shape):
            values = safe_get_local_optimizer_state(parameter, key)
            pieces[f"optimizer/{name}/{key}"] = Piece(values.detach().flatten()[:count], start, shape)
        if start == 0:
            pieces |= _numbers(zero, flat, name)
    return pieces


def _numbers(zero: Any, flat: Tensor, name: str) -> dict[str, Piece]:
    """Adam's count of steps, which all parameters have alike."""
    kept = zero.optimizer.state.get(flat, {})
    return {
        f"optimizer/{name}/{key}": Piece.whole(value)
        for key, value in kept.items()
        if key == COUNT and torch.is_tensor(value)
    }


def set_whole_optimizer_state(engine: Any, network: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Take over whole `NAME/KEY` tensors. What one parameter has all must have: pieces hold parts of several."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    zero, stage = engine.optimizer, engine.zero_optimization_stage()
    trained = _trained(network)
    shared, elementwise = _keys(state, trained)
    for piece in _pieces(zero, stage):
        zero.optimizer.state[piece] = {
            **{key: value.clone() for key, value in shared.items()},
            **{key: torch.zeros_like(piece) for key in elementwise},
        }
    if stage < 3:  # the parameters' views into these tensors, which DeepSpeed otherwise makes in the first step
        zero._hp_optimizer_states_linked = False
        if elementwise:  # DeepSpeed does it once: without anything to link it must be left to that step
            zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in trained:
        for key in elementwise:
            value = state[f"{name}/{key}"].to(engine.device, torch.float32).contiguous()
            if stage < 3:
                safe_set_full_optimizer_state(parameter, value, key)
            else:
                safe_set_local_optimizer_state(parameter, _own_part(engine, parameter, value), key)


def _own_part(engine: Any, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor under ZeRO-3: equal parts, the last one filled up with zeros.

    DeepSpeed's own function for it reads past the end if the ranks do not divide the number of elements.
    """
    part: int = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
    padded = value.new_zeros(part * engine.dp_world_size)
    padded[: value.numel()] = value.flatten()
    return padded.narrow(0, part * torch.distributed.get_rank(), part)


def _keys(state: Mapping[str, Tensor], trained: list[tuple[str, nn.Parameter]]) -> tuple[dict[str, Tensor], list[str]]:
    """What of the state is one number (Adam's step), and the names of what is a tensor like its parameter."""
    keys = sorted({entry.rpartition("/")[2] for entry in state})
    for name, _ in trained:
        for key in keys:
            if f"{name}/{key}" not in state:
                raise DataError(f"optimizer state: {name} has no {key}, but other parameters have")
    first = trained[0][0]
    shared = {key: state[f"{first}/{key}"] for key in keys if key == COUNT}
    return shared, [key for key in keys if key not in shared]


def _pieces(zero: Any, stage: int) -> list[Tensor]:
    """The flat tensors that the optimizer of this rank really updates."""
    return list(zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups)


def _trained(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in network.named_parameters() if parameter.requires_grad]
