"""Networks of timm, by name. The only file that knows timm."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import Any

from torch import nn

from ..config import ConfigError
from .factory import FROM_TIMM, OURS
from .settings import ModelSettings
from .torchvision_import import import_torchvision


def make(settings: ModelSettings, *, channels: int, size: int, classes: int) -> nn.Module:
    """The network, with a classifier of its own size; with published weights if `settings.pretrained`."""
    timm = _import_timm(settings.name)
    name = settings.name.removeprefix(FROM_TIMM)
    _check_name(timm, settings.name, name)
    options: dict[str, Any] = {"drop_rate": settings.drop_rate} if settings.drop_rate else {}
    try:
        if _is_of_one_size(timm, name, size):
            options["img_size"] = size
        network: nn.Module = timm.create_model(
            name, pretrained=settings.pretrained, num_classes=classes, in_chans=channels, **options
        )
    except Exception as error:  # what its hundreds of networks, or a download, may raise is not documented
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if settings.pretrained:
            raise ConfigError(
                f"model.pretrained: no published weights of {name} could be had ({what}). Without a network, download "
                "them elsewhere and name the file in model.weights, or set model.pretrained=false"
            ) from error
        wanted = f"{channels} channels, {size} x {size} pixels and {classes} classes"
        raise ConfigError(f"model.name = {settings.name!r}: timm cannot make it for {wanted} ({what})") from error
    return network


def classifiers(network: nn.Module) -> list[str]:
    """Names of the modules that depend on the number of classes."""
    names = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    return [names] if isinstance(names, str) else list(names)


def with_common_statistics(network: nn.Module) -> nn.Module:
    """The network with batch norms that take their statistics over all ranks.

    Many of timm's norms have an activation inside, which torch's own conversion would drop without a word.
    """
    from timm.layers import convert_sync_batchnorm

    converted: nn.Module = convert_sync_batchnorm(network)
    return converted


def _import_timm(name: str) -> ModuleType:
    try:
        import_torchvision()
        import timm
    except Exception as error:  # a wrong torchvision raises whatever its libraries do
        raise ConfigError(
            f"model.name = {name!r}: not one of ours ({', '.join(OURS)}), and timm cannot be imported "
            f"({type(error).__name__}: {error}): pip install 'sopdist[timm]'"
        ) from error
    module: ModuleType = timm
    return module


def _check_name(timm: ModuleType, asked: str, name: str) -> None:
    """`NAME` or `NAME.WEIGHTS`; with a colon, as in hf-hub:OWNER/NAME, only timm can tell."""
    base = name.partition(".")[0]
    if ":" in name or timm.is_model(base):
        return
    near = difflib.get_close_matches(base, [*OURS, *timm.list_models()], 3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"ours are {', '.join(OURS)}; timm.list_models() has more"
    raise ConfigError(f"model.name = {asked!r}: neither we nor timm have a network of that name; {hint}")


def _is_of_one_size(timm: ModuleType, name: str, size: int) -> bool:
    """Transformers are made for one size of images, and have to be told if it is another."""
    if ":" in name:
        return False
    published = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return published is not None and bool(published.fixed_input_size) and published.input_size[-1] != size
