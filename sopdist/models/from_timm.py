"""timm models, by name. The only module that uses timm."""

from __future__ import annotations

import difflib
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import ConfigError
from .factory import BUILTIN_MODELS, TIMM_PREFIX
from .settings import ModelSettings
from .torchvision_import import import_torchvision


def make(settings: ModelSettings, *, channels: int, size: int, classes: int) -> nn.Module:
    """Build the network with a classifier for `classes`, and with pretrained weights if `settings.pretrained`."""
    timm = _import_timm(settings.name)
    name = settings.name.removeprefix(TIMM_PREFIX)
    _check_name(timm, settings.name, name)
    options: dict[str, Any] = {"drop_rate": settings.drop_rate} if settings.drop_rate else {}
    try:
        if _needs_image_size(timm, name, size):
            options["img_size"] = size
        network: nn.Module = timm.create_model(
            name, pretrained=settings.pretrained, num_classes=classes, in_chans=channels, **options
        )
    except Exception as error:  # timm's models and downloads raise undocumented errors
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if settings.pretrained:
            raise ConfigError(
                f"model.pretrained: cannot load the pretrained weights of {name} ({what}). If this machine is offline, "
                "download them elsewhere and set model.weights to the file, or set model.pretrained=false"
            ) from error
        wanted = f"{channels} channels, {size} x {size} pixels and {classes} classes"
        raise ConfigError(f"model.name = {settings.name!r}: timm cannot build it for {wanted} ({what})") from error
    return network


def classifiers(network: nn.Module) -> list[str]:
    """The names of the modules that depend on the number of classes."""
    names = getattr(network, "pretrained_cfg", {}).get("classifier") or ()
    return [names] if isinstance(names, str) else list(names)


def with_synced_statistics(network: nn.Module) -> nn.Module:
    """Convert the network's batch norms to synchronise their statistics across ranks.

    Many of timm's norms include an activation, which torch's own conversion would silently drop.
    """
    from timm.layers import convert_sync_batchnorm

    converted: nn.Module = convert_sync_batchnorm(network)
    return converted


def _import_timm(name: str) -> ModuleType:
    try:
        import_torchvision()
        import timm
    except Exception as error:  # an incompatible torchvision may raise any error
        raise ConfigError(
            f"model.name = {name!r}: not a built-in model ({', '.join(BUILTIN_MODELS)}), and timm cannot be imported "
            f"({type(error).__name__}: {error}): pip install 'sopdist[timm]'"
        ) from error
    module: ModuleType = timm
    return module


def _check_name(timm: ModuleType, full_name: str, name: str) -> None:
    """Check `NAME` or `NAME.WEIGHTS`. Names with a colon, such as hf-hub:OWNER/NAME, can only be checked by timm."""
    base = name.partition(".")[0]
    if ":" in name or timm.is_model(base):
        return
    near = difflib.get_close_matches(base, [*BUILTIN_MODELS, *timm.list_models()], 3)
    available = f"built-in models: {', '.join(BUILTIN_MODELS)}; timm.list_models() lists the others"
    hint = f"did you mean {' or '.join(near)}?" if near else available
    raise ConfigError(f"model.name = {full_name!r}: no built-in or timm model has this name; {hint}")


def _needs_image_size(timm: ModuleType, name: str, size: int) -> bool:
    """Whether the model is built for a fixed image size, as transformers are, and `size` differs from its default."""
    if ":" in name:
        return False
    published = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return published is not None and bool(published.fixed_input_size) and published.input_size[-1] != size
