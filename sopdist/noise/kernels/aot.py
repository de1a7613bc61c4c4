"""Compile the CUDA kernels ahead of time, on a machine with or without a GPU, and report their resource usage.

Reports for each kernel and GPU target: registers per thread, bytes spilled to local memory, and whether the row kernels
use only operations whose rounding IEEE 754 defines (no fused multiply-add, no approximate division or square root).
Such operations make a table on a GPU equal to one on a CPU, bit for bit.

Must run without TRITON_INTERPRET: the interpreter replaces the compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..rates import RULES

TARGETS = (80, 90, 100)
CLASSES = (10, 1000, 22_000)
LOGITS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
_SLOTS = 8
# Instructions whose result depends on the device or the compiler.
_INEXACT = re.compile(
    r"\b(fma\.\w+\.f32|(?:mul|add|sub)\.f32|div\.(?:full|approx)\S*|sqrt\.approx\S*|rsqrt\S*|rcp\.approx\S*|ex2\S*|lg2\S*)"
)


@dataclass(frozen=True)
class Build:
    """One specialisation of a kernel."""

    kernel: str
    layout: str
    detail: str  # dtype of the logits, or the update rule
    classes: int
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    fused_multiply_add: bool


@dataclass(frozen=True)
class Usage:
    """Resource usage of a build on one target."""

    kernel: str
    layout: str
    detail: str
    classes: int
    target: str
    registers: int
    spilled_bytes: int
    cubin_bytes: int
    inexact: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return asdict(self)


def builds(classes: tuple[int, ...] = CLASSES) -> Iterator[Build]:
    """Yield all specialisations: both kernels, both layouts, all logit dtypes and update rules."""
    from . import triton_loss, triton_rows

    for count in classes:
        block, warps = triton_loss.launch_shape(count)
        for layout in ("dense", "slots"):
            for name, pointer in LOGITS.items():
                constants = {
                    "M": _SLOTS,
                    "SLOTS": layout == "slots",
                    "RECLIP": False,
                    "TARGET": True,
                    "BLOCK": block,
                    "ONE_BLOCK": count <= block,
                }
                signature = _signature(triton_loss.loss_kernel, constants) | {"logits_ptr": pointer}
                yield Build(
                    "loss",
                    layout,
                    name,
                    count,
                    triton_loss.loss_kernel,
                    signature,
                    constants,
                    warps,
                    fused_multiply_add=True,
                )
        block, warps = triton_rows.dense_launch_shape(count)
        for position, rule in enumerate(RULES):
            shared = {"RULE": position, "SCAN": triton_rows.MAX_SCAN}
            for kernel, layout, own, num_warps in (
                (triton_rows.dense_rows_kernel, "dense", {"BLOCK": block}, warps),
                (triton_rows.slots_rows_kernel, "slots", {"M": _SLOTS, "BLOCK": _SLOTS}, 1),
            ):
                constants = shared | own
                signature = _signature(kernel, constants)
                yield Build(
                    "rows", layout, rule, count, kernel, signature, constants, num_warps, fused_multiply_add=False
                )


def _signature(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    """Argument types by name, as `triton_loss` and `triton_rows` declare them."""
    types = {"eps": "fp32", "target": "fp32", "rate_v": "fp32", "rate_u": "fp32", "seed": "i64"}
    types |= dict.fromkeys(("labels_ptr", "index_ptr", "predicted_ptr"), "*i64")
    types |= {"keep_ptr": "*u8", "class_ptr": "*i16", "visits_ptr": "*i32", "evictions_ptr": "*i32"}
    types |= dict.fromkeys(constants, "constexpr")
    return {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}


def compile_build(build: Build, capability: int) -> Usage:
    """Compile for one target, e.g. 90 for sm_90, down to GPU machine code."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("cannot compile with TRITON_INTERPRET=1 set: unset it")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=build.function, signature=build.signature, constexprs=build.constants)
    options = {"num_warps": build.warps, "enable_fp_fusion": build.fused_multiply_add}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    registers, spilled = _resources(cubin)
    inexact = tuple(sorted(set(_INEXACT.findall(compiled.asm["ptx"]))))
    about = (build.kernel, build.layout, build.detail, build.classes)
    return Usage(*about, f"sm_{capability}", registers, spilled, len(cubin), inexact)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread and bytes of local memory per thread, as `cuobjdump` reads them from the machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    registers, stack, local = (int(value) for value in found.groups())
    return registers, stack + local
