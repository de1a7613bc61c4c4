"""From the config of a run to the description of a network that stands alone: what it is, what it takes, what its
logits mean. Knows no weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ... import __version__
from ...data.augment.recipes import Recipe
from ...models import make_model
from ...models.exported import Exported
from ...models.factory import FROM_TIMM, OURS
from ...models.settings import ModelSettings


def describe(
    settings: ModelSettings, recipe: Recipe, classes: int, label_names: Sequence[str] | None = None
) -> Exported:
    """What must be known of the network beside its weights. Never where its first weights came from."""
    channels = 1 if recipe.grey else 3
    return Exported(
        name=_lasting_name(settings, channels, recipe.size, classes),
        channels=channels,
        size=recipe.size,
        classes=classes,
        mean=list(recipe.mean[:channels]),
        std=list(recipe.std[:channels]),
        resize=0 if recipe.crop == "shift" else recipe.resize,
        drop_rate=settings.drop_rate,
        label_names=None if label_names is None else list(label_names),
        version=__version__,
    )


def _lasting_name(settings: ModelSettings, channels: int, size: int, classes: int) -> str:
    """The name under which the network can be made again without the weights, or the hub, that it began with."""
    name = settings.name.removeprefix(FROM_TIMM)
    if settings.name in OURS:
        return settings.name
    if ":" not in name:
        return FROM_TIMM + name.partition(".")[0]
    bare = replace(settings, pretrained=False, weights="")
    network = make_model(bare, channels=channels, size=size, classes=classes)  # only timm can tell
    return f"{FROM_TIMM}{network.pretrained_cfg['architecture']}"  # type: ignore[index]
