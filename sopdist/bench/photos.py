"""Shards of realistic JPEGs, cropped from the two photographs that scikit-learn ships."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from ..data.labels import GIVEN, write_labels
from ..data.manifest import Manifest, ShardInfo, shard_name
from ..data.shards import Member, write_shard

_SIZES = ((500, 375), (375, 500), (400, 400), (256, 256), (341, 256))  # typical of web images
_CLASSES = ("a", "b")


def photo_jpegs(count: int, seed: int = 0) -> list[bytes]:
    """JPEGs of about 65 kB: random crops of the photographs, scaled to common sizes."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]  # 640 x 427 each
    random = np.random.default_rng(seed)
    jpegs = []
    for i in range(count):
        photo, (width, height) = photos[i % 2], _SIZES[i % len(_SIZES)]
        scale = min(photo.width / width, photo.height / height) * random.uniform(0.6, 1.0)
        box_width, box_height = width * scale, height * scale
        x, y = random.uniform(0, photo.width - box_width), random.uniform(0, photo.height - box_height)
        image = photo.resize((width, height), Image.Resampling.LANCZOS, (x, y, x + box_width, y + box_height))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=96)
        jpegs.append(buffer.getvalue())
    return jpegs


def write_photo_shards(folder: Path, images: list[bytes], extension: str, per_shard: int, copies: int = 1) -> Manifest:
    """Write a split to `folder` that holds every image `copies` times, under distinct keys."""
    shards: list[ShardInfo] = []
    first = 0
    for copy in range(copies):
        for start in range(0, len(images), per_shard):
            members = [
                Member(f"{copy}/{start + i:06d}", extension, image, {"label": i % 2})
                for i, image in enumerate(images[start : start + per_shard])
            ]
            info = replace(write_shard(folder / shard_name(len(shards)), members), first=first)
            shards.append(info)
            first += info.samples
    manifest = Manifest("bench", "train", _CLASSES, tuple(shards))
    write_labels(folder, manifest, GIVEN, np.arange(manifest.samples) % 2, {"kind": "made up"})
    manifest.write(folder)
    return manifest
