"""The DALI graph: decode a box of each image, resize it to a square, mirror, normalise. The only file that uses DALI.

Without a GPU everything runs on the CPU. With a GPU (`device` is its index), JPEGs are decoded partly on the GPU
("mixed"), and the other operations run there. The GPU path follows DALI's documentation and has not been run on
hardware yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ..augment.recipes import Recipe

ENCODED = "encoded"
BLACK = np.zeros((1, 1, 3), np.uint8)  # the smallest image

Pipeline = Any  # nvidia.dali.Pipeline, which is untyped


def build_pipeline(
    recipe: Recipe, batch: int, strong: Sequence[bool], threads: int, depth: int, device: int | None
) -> Pipeline:
    """Build a pipeline whose inputs are set by `feed` and whose outputs are the views, (B, S, S, 3).

    A view is normalised float32 or, if it is to become a strong one, uint8, as input of the policy.
    """
    try:
        from nvidia.dali import fn, pipeline_def, types
    except ImportError as error:
        raise DataError(f"data.backend = dali: DALI cannot be imported ({error}); use backend cpu") from None
    views = len(strong)
    decode_on, work_on = ("cpu", "cpu") if device is None else ("mixed", "gpu")

    @pipeline_def(
        batch_size=batch, num_threads=threads, device_id=device, prefetch_queue_depth=depth,
        exec_dynamic=True,  # so that outputs stay valid while the next batch is produced
    )  # fmt: skip
    def graph() -> tuple[Any, ...]:
        encoded = fn.external_source(name=ENCODED, dtype=types.UINT8, ndim=1)
        boxes = [
            {
                name: fn.external_source(name=f"{name}{view}", dtype=types.INT32, ndim=ndim)
                for name, ndim in (("anchor", 1), ("shape", 1), ("mirror", 0))
            }
            for view in range(views)
        ]
        full_image = views > 1 or recipe.crop == "shift"
        if full_image:
            image = fn.decoders.image(encoded, device=decode_on, output_type=types.RGB, adjust_orientation=False)
        outputs = []
        for view, box in enumerate(boxes):
            if full_image:
                part = fn.slice(
                    image, box["anchor"], box["shape"], axis_names="WH", normalized_anchor=False,
                    normalized_shape=False, out_of_bounds_policy="pad", fill_values=0,
                )  # fmt: skip
            else:  # decode only the box
                part = fn.decoders.image_slice(
                    encoded, box["anchor"], box["shape"], axis_names="WH", normalized_anchor=False,
                    normalized_shape=False, device=decode_on, output_type=types.RGB, adjust_orientation=False,
                )  # fmt: skip
            part = fn.resize(part, size=(recipe.size, recipe.size), interp_type=types.INTERP_LINEAR, antialias=True)
            if not strong[view]:
                outputs.append(
                    fn.crop_mirror_normalize(
                        part,
                        device=work_on,
                        mirror=box["mirror"],
                        dtype=types.FLOAT,
                        output_layout="HWC",
                        mean=[255 * mean for mean in recipe.mean],
                        std=[255 * std for std in recipe.std],
                    )
                )
            else:
                outputs.append(fn.flip(part, device=work_on, horizontal=box["mirror"]))
        return tuple(outputs)

    pipeline = graph()
    pipeline.build()
    _warm_up(pipeline, views, depth)
    return pipeline


def _warm_up(pipeline: Pipeline, views: int, depth: int) -> None:
    """Run `depth` dummy batches: the first schedule_run() starts that many at once, each later call a single one."""
    boxes = [(np.array([[0, 0, 1, 1]], np.int32), np.array([False]))] * views
    for _ in range(depth):
        feed(pipeline, [np.frombuffer(ppm(BLACK), np.uint8)], boxes)
    pipeline.schedule_run()
    for _ in range(depth):
        pipeline.share_outputs()
        pipeline.release_outputs()


def feed(
    pipeline: Pipeline,
    encoded: list[NDArray[np.uint8]],
    boxes: list[tuple[NDArray[np.int32], NDArray[np.bool_]]],
    part: slice = slice(None),
) -> None:
    """Feed a batch, or a part of it, to the pipeline: the encoded images, and the boxes and mirroring of each view."""
    pipeline.feed_input(ENCODED, encoded[part])
    for view, (box, mirror) in enumerate(boxes):
        pipeline.feed_input(f"anchor{view}", np.ascontiguousarray(box[part, :2]))
        pipeline.feed_input(f"shape{view}", np.ascontiguousarray(box[part, 2:]))
        pipeline.feed_input(f"mirror{view}", mirror[part].astype(np.int32))


def ppm(pixels: NDArray[np.uint8]) -> bytes:
    """Encode pixels as PPM, an uncompressed format that DALI can read."""
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()
