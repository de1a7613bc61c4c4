"""Probes of Python packages. Each imports what it asks about, so each runs in a process of its own (`isolation.py`).

`python -m sopdist.doctor.packages NAME` runs one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from .finding import Finding
from .isolation import answer, short

_OPERATOR = "deepspeed_shm_comm"
_NOT_NEEDED = "nothing to do: sopdist trains without it; other programs need ninja and g++"


def probe_python() -> list[Finding]:
    """The interpreter that runs this."""
    version = f"{platform.python_version()}, {platform.machine()}, {sys.executable}"
    return [Finding("python", "ok", version, needed=True)]


def probe_torch() -> list[Finding]:
    """torch, the GPUs that it sees, and NCCL."""
    torch, problem = _imported("torch", "torch", "make env, or pip install torch", needed=True)
    if torch is None:
        return [problem]
    found = [Finding("torch", "ok", torch.__version__, needed=True)]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        found += [_gpu(torch), _nccl(torch)]
    elif shutil.which("nvidia-smi"):
        advice = (
            "install a torch with CUDA: https://pytorch.org/get-started"
            if torch.version.cuda is None
            else "the driver is too old for this CUDA, or no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        built = "none" if torch.version.cuda is None else torch.version.cuda
        found.append(Finding("CUDA", "broken", f"nvidia-smi is here, but torch (CUDA {built}) sees no GPU", advice))
    else:
        built = (
            "torch is a CPU build" if torch.version.cuda is None else f"torch is built for CUDA {torch.version.cuda}"
        )
        found.append(Finding("CUDA", "note", f"no GPU; {built}", "nothing to do: training runs on the CPU, slowly"))
    return found


def _gpu(torch: ModuleType) -> Finding:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability(0)
    detail = f"{len(names)} x {names[0]} (sm_{major}{minor}), CUDA {torch.version.cuda}"
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        detail = f"{detail}: {short(str(error))}"
        advice = "is it in use by others (nvidia-smi), or too new or too old for this torch?"
        return Finding("CUDA", "broken", detail, advice, needed=True)
    return Finding("CUDA", "ok", detail, needed=True)


def _nccl(torch: ModuleType) -> Finding:
    if not torch.distributed.is_nccl_available():
        return Finding("NCCL", "missing", "torch has no NCCL", "several GPUs need it: install a torch with CUDA")
    return Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def probe_kernels() -> list[Finding]:
    """Our own C, for the noise table and for images."""
    from ..data.decode import pixels
    from ..noise.kernels import native_kernels

    found = []
    for what, built in (("C kernels, table", native_kernels.is_built()), ("C kernels, images", pixels.is_built())):
        if built:
            found.append(Finding(what, "ok", "compiled"))
        else:
            advice = "install a C compiler (Debian: apt-get install gcc), then install sopdist again"
            found.append(Finding(what, "missing", "not compiled: slower ones of Python are used", advice))
    return found


def probe_triton() -> list[Finding]:
    """Triton, which a GPU's kernels are written in."""
    triton, problem = _imported("triton", "Triton", "for GPUs: pip install 'sopdist[triton]'; without, it is slower")
    if triton is None:
        return [problem]
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [Finding("Triton", "note", f"{triton.__version__}, interpreting", "unset TRITON_INTERPRET to train")]
    return [Finding("Triton", "ok", triton.__version__)]


def probe_decoders() -> list[Finding]:
    """What turns the bytes of an image into pixels on the CPU."""
    versions = []
    for module, package in (("PIL", "pillow"), ("simplejpeg", "simplejpeg"), ("numpy", "numpy"), ("yaml", "pyyaml")):
        loaded, problem = _imported(
            module, "images and configs", f"pip install {package}, or 'sopdist[data,train]'", needed=True
        )
        if loaded is None:
            return [problem]
        versions.append(f"{package} {_version(package)}")
    return [Finding("images and configs", "ok", ", ".join(versions), needed=True)]


def probe_dali() -> list[Finding]:
    """DALI, which decodes if there is a GPU."""
    advice = "pip install nvidia-dali-cuda120, or train with data.backend=cpu"
    dali, problem = _imported("nvidia.dali", "DALI", advice)
    if dali is None:
        return [problem]
    return [Finding("DALI", "ok", dali.__version__)]


def probe_accelerate() -> list[Finding]:
    """accelerate, through which every engine runs."""
    accelerate, problem = _imported("accelerate", "accelerate", "pip install 'sopdist[train]'", needed=True)
    return [problem if accelerate is None else Finding("accelerate", "ok", accelerate.__version__, needed=True)]


def probe_deepspeed() -> list[Finding]:
    """DeepSpeed, what accelerate wants beside it, and the operator that it compiles for itself."""
    advice = "for engine.kind=deepspeed: install torch first, then pip install --no-build-isolation deepspeed"
    deepspeed, problem = _imported("deepspeed", "DeepSpeed", advice)
    if deepspeed is None:
        return [problem]
    found = [Finding("DeepSpeed", "ok", deepspeed.__version__)]
    if importlib.util.find_spec("transformers") is None:
        advice = "pip install transformers: accelerate imports it for DeepSpeed"
        found.append(Finding("transformers", "missing", "not installed", advice))
    import torch

    if not torch.cuda.is_available():
        found.append(_operator())
    return found


def _operator() -> Finding:
    """An all-reduce that DeepSpeed compiles, with ninja, when it first runs on a CPU. Our engine switches it off."""
    what = "DeepSpeed's CPU operator"
    from torch.utils import cpp_extension

    # Where torch puts it; asking torch would make the folder.
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    place = Path(root) if root else Path(cpp_extension.get_default_build_root()) / f"py{_tag()}_cpu"
    lacking = []
    if shutil.which("ninja") is None:
        beside = (Path(sys.executable).parent / "ninja").exists()
        lacking.append("ninja is installed, but not on PATH" if beside else "no ninja")
    if not (place / _OPERATOR / f"{_OPERATOR}.so").is_file():
        compilers = [os.environ.get("CXX"), "c++", "g++", "clang++"]
        if not any(shutil.which(compiler) for compiler in compilers if compiler):
            lacking.append("no C++ compiler")
        if not _can_write(place):
            lacking.append(f"{place} cannot be written")
        detail = "not compiled" if not lacking else f"not compiled, and cannot be: {', '.join(lacking)}"
        return Finding(what, "note", detail, _NOT_NEEDED)
    if lacking:
        return Finding(what, "note", f"compiled, but {lacking[0]}", _NOT_NEEDED)
    return Finding(what, "ok", f"compiled: {place / _OPERATOR}")


def probe_timm() -> list[Finding]:
    """timm and torchvision, for networks that are not ours."""
    advice = "for networks of timm: pip install timm torchvision, of the same build as torch; ours need neither"
    torchvision, vision = _imported("torchvision", "torchvision", advice)
    if torchvision is not None:
        vision = Finding("torchvision", "ok", torchvision.__version__)
    elif vision.state == "broken":
        from ..models.torchvision_import import import_torchvision

        try:
            import_torchvision()
        except Exception as error:
            vision = Finding("torchvision", "broken", short(f"{type(error).__name__}: {error}"), advice)
        else:
            detail = f"{_version('torchvision')}: its compiled part does not fit this torch"
            vision = Finding("torchvision", "note", detail, "nothing to do: no network of timm needs that part")
    timm, problem = _imported("timm", "timm", advice)
    return [vision, problem if timm is None else Finding("timm", "ok", timm.__version__)]


def probe_wandb() -> list[Finding]:
    """Weights & Biases: is it there, and would it be online?"""
    wandb, problem = _imported("wandb", "W&B", "optional: pip install wandb, or log.wandb=off")
    if wandb is None:
        return [problem]
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        return [Finding("W&B", "note", f"{wandb.__version__}, WANDB_MODE={mode}", "unset it to log online")]
    if _logged_in():
        return [Finding("W&B", "ok", f"{wandb.__version__}, logged in")]
    advice = "nothing to do: runs are kept offline, for `wandb sync`; or `wandb login`"
    return [Finding("W&B", "note", f"{wandb.__version__}, not logged in", advice)]


def _logged_in() -> bool:
    """Whether there is a key, without a look at it: only the names of hosts are taken from the file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0].split(":")[0]
    for path in (Path(os.environ.get("NETRC") or "~/.netrc").expanduser(), Path("~/_netrc").expanduser()):
        try:
            words = path.read_text(encoding="utf-8", errors="replace").split()
        except (OSError, RuntimeError):
            continue
        if any(pair == ("machine", host) for pair in itertools.pairwise(words)):
            return True
    return False


def _imported(module: str, what: str, advice: str, *, needed: bool = False) -> tuple[ModuleType | None, Finding]:
    """The module; or what is wrong with it."""
    try:
        return importlib.import_module(module), Finding(what, "ok", "")
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return None, Finding(what, "missing", "not installed", advice, needed)
        return None, Finding(what, "broken", short(f"needs {error.name}, which is not installed"), advice, needed)
    except Exception as error:  # a package may raise anything while it is imported
        return None, Finding(what, "broken", short(f"{type(error).__name__}: {error}"), advice, needed)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _tag() -> str:
    return f"{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"


def _can_write(folder: Path) -> bool:
    """Whether the folder could be made and written to; its nearest parent that is there decides."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


PROBES: dict[str, Callable[[], list[Finding]]] = {
    "python": probe_python,
    "torch": probe_torch,
    "accelerate": probe_accelerate,
    "deepspeed": probe_deepspeed,
    "images and configs": probe_decoders,
    "kernels": probe_kernels,
    "triton": probe_triton,
    "dali": probe_dali,
    "timm": probe_timm,
    "wandb": probe_wandb,
}

if __name__ == "__main__":
    answer(sys.argv[1:], PROBES)
