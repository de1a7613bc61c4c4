"""Compile the CUDA kernels ahead of time, on a machine with or without a GPU, and say what they became.

For each kernel and GPU target: registers a thread, bytes spilled to local memory, and whether the row kernels kept to
operations that IEEE 754 rounds in one way (no fused multiply-add, no approximate division or square root), which is
what makes a table on a GPU equal to one on a CPU bit for bit.

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
# Instructions whose result depends on the device or on the compiler's mood.
_INEXACT = re.compile(
    r"\b(fma\.\w+\.f32|(?:mul|add|sub)\.f32|div\.(?:full|approx)\S*|sqrt\.approx\S*|rsqrt\S*|rcp\.approx\S*|ex2\S*|lg2\S*)"
)


@dataclass(frozen=True)
class Build:
    """One kernel, specialised."""

    kernel: str
    layout: str
    detail: str  # the type of the logits, or the update rule
    classes: int
    function: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    fused_multiply_add: bool


@dataclass(frozen=True)
class Usage:
    """What a build became on one target."""

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
        """For JSON."""
        return asdict(self)


def builds(classes: tuple[int, ...] = CLASSES) -> Iterator[Build]:
    """Every specialisation worth looking at: both kernels, both layouts, all logit types and update rules."""
    from . import triton_loss, triton_rows

    for count in classes:
        block, warps = triton_loss.launch_shape(count)
        for layout in ("dense", "slots"):
            for name, pointer in LOGITS.items():
                constants = {
                    "M": _SLOTS,
                    "SLOTS": layout == "slots",
                    "RECLIP": False,
                    "BLOCK": block,
                    "WHOLE": count <= block,
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
        for number, rule in enumerate(RULES):
            shared = {"RULE": number, "SCAN": triton_rows.MAX_SCAN}
            for kernel, layout, own, lanes in (
                (triton_rows.dense_rows_kernel, "dense", {"BLOCK": block}, warps),
                (triton_rows.slots_rows_kernel, "slots", {"M": _SLOTS, "BLOCK": _SLOTS}, 1),
            ):
                constants = shared | own
                signature = _signature(kernel, constants)
                yield Build("rows", layout, rule, count, kernel, signature, constants, lanes, fused_multiply_add=False)


def _signature(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    """Types of the arguments by their names, as `triton_loss` and `triton_rows` declare them."""
    types = {"eps": "fp32", "rate_v": "fp32", "rate_u": "fp32", "seed": "i64"}
    types |= dict.fromkeys(("labels_ptr", "index_ptr", "predicted_ptr"), "*i64")
    types |= {"keep_ptr": "*u8", "class_ptr": "*i16", "visits_ptr": "*i32", "evictions_ptr": "*i32"}
    types |= dict.fromkeys(constants, "constexpr")
    return {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}


def compile_build(build: Build, capability: int) -> Usage:
    """Compile for one target, e.g. 90 for sm_90, down to the machine code of the GPU."""
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
    where = (build.kernel, build.layout, build.detail, build.classes)
    return Usage(*where, f"sm_{capability}", registers, spilled, len(cubin), inexact)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of local memory a thread, as NVIDIA's own tool reads them from the machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text!r}")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local
