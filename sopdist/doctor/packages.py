"""Probes of Python packages. Each imports the packages that it checks, so each needs its own process (`isolation`)."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType

from .finding import Finding
from .isolation import shorten

_OPERATOR = "deepspeed_shm_comm"
_NOT_NEEDED = "nothing to do: sopdist does not use it; other programs need ninja and g++ to compile it"


def probe_python() -> list[Finding]:
    """The Python interpreter."""
    version = f"{platform.python_version()}, {platform.machine()}, {sys.executable}"
    return [Finding("python", "ok", version, needed=True)]


def probe_torch() -> list[Finding]:
    """torch, its GPUs, and NCCL."""
    torch, problem = _import_package("torch", "torch", "make env, or pip install torch", needed=True)
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
            else "the driver is too old for this CUDA, or no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
        built = "none" if torch.version.cuda is None else torch.version.cuda
        found.append(
            Finding("CUDA", "broken", f"nvidia-smi is installed, but torch (CUDA {built}) finds no GPU", advice)
        )
    else:
        built = (
            "torch is a CPU build" if torch.version.cuda is None else f"torch is built for CUDA {torch.version.cuda}"
        )
        found.append(Finding("CUDA", "note", f"no GPU; {built}", "nothing to do: training runs on the CPU, slowly"))
    return found


def _gpu(torch: ModuleType) -> Finding:
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    major, minor = torch.cuda.get_device_capability(0)
    detail = f"{len(names)} x {names[0]} (sm_{major}{minor}), CUDA {torch.version.cuda}"
    try:
        torch.ones(8, device="cuda").sum().item()
    except RuntimeError as error:
        detail = f"{detail}: {shorten(str(error))}"
        advice = "check whether other processes use it (nvidia-smi), and whether this torch supports it"
        return Finding("CUDA", "broken", detail, advice, needed=True)
    return Finding("CUDA", "ok", detail, needed=True)


def _nccl(torch: ModuleType) -> Finding:
    if not torch.distributed.is_nccl_available():
        return Finding("NCCL", "missing", "torch has no NCCL", "needed for several GPUs: install a torch with CUDA")
    return Finding("NCCL", "ok", ".".join(map(str, torch.cuda.nccl.version())))


def probe_kernels() -> list[Finding]:
    """The C kernels of sopdist, for the noise table and for images."""
    from ..data.decode import pixels
    from ..noise.kernels import native_kernels

    found = []
    for what, built in (("C kernels, table", native_kernels.is_built()), ("C kernels, images", pixels.is_built())):
        if built:
            found.append(Finding(what, "ok", "compiled"))
        else:
            advice = "install a C compiler (Debian: apt-get install gcc), then reinstall sopdist"
            found.append(Finding(what, "missing", "not compiled: slower Python code is used instead", advice))
    return found


def probe_triton() -> list[Finding]:
    """Triton, for the GPU kernels."""
    triton, problem = _import_package(
        "triton", "Triton", "for GPUs: pip install 'sopdist[triton]'; training is slower without it"
    )
    if triton is None:
        return [problem]
    if os.environ.get("TRITON_INTERPRET") == "1":
        return [Finding("Triton", "note", f"{triton.__version__}, interpreter mode", "unset TRITON_INTERPRET to train")]
    return [Finding("Triton", "ok", triton.__version__)]


def probe_images_and_configs() -> list[Finding]:
    """The packages that decode images on the CPU and read configs."""
    versions = []
    for module, package in (("PIL", "pillow"), ("simplejpeg", "simplejpeg"), ("numpy", "numpy"), ("yaml", "pyyaml")):
        loaded, problem = _import_package(
            module, "images and configs", f"pip install {package}, or 'sopdist[data,train]'", needed=True
        )
        if loaded is None:
            return [problem]
        versions.append(f"{package} {_version(package)}")
    return [Finding("images and configs", "ok", ", ".join(versions), needed=True)]


def probe_dali() -> list[Finding]:
    """DALI, which decodes images on a GPU."""
    advice = "pip install nvidia-dali-cuda120, or train with data.backend=cpu"
    dali, problem = _import_package("nvidia.dali", "DALI", advice)
    if dali is None:
        return [problem]
    return [Finding("DALI", "ok", dali.__version__)]


def probe_accelerate() -> list[Finding]:
    """accelerate, which every engine uses."""
    accelerate, problem = _import_package("accelerate", "accelerate", "pip install 'sopdist[train]'", needed=True)
    return [problem if accelerate is None else Finding("accelerate", "ok", accelerate.__version__, needed=True)]


def probe_deepspeed() -> list[Finding]:
    """DeepSpeed, transformers (which accelerate needs for it), and the operator that DeepSpeed compiles."""
    advice = "for engine.kind=deepspeed: install torch first, then pip install --no-build-isolation deepspeed"
    deepspeed, problem = _import_package("deepspeed", "DeepSpeed", advice)
    if deepspeed is None:
        return [problem]
    found = [Finding("DeepSpeed", "ok", deepspeed.__version__)]
    if importlib.util.find_spec("transformers") is None:
        advice = "pip install transformers: accelerate imports it for DeepSpeed"
        found.append(Finding("transformers", "missing", "not installed", advice))
    import torch

    if not torch.cuda.is_available():
        found.append(_cpu_operator())
    return found


def _cpu_operator() -> Finding:
    """An all-reduce that DeepSpeed compiles with ninja at its first run on a CPU. The engine of sopdist disables it."""
    what = "DeepSpeed's CPU operator"
    from torch.utils import cpp_extension

    # The path that torch uses. Torch's own function for it would create the folder.
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    folder = Path(root) if root else Path(cpp_extension.get_default_build_root()) / f"py{_python_tag()}_cpu"
    missing = []
    if shutil.which("ninja") is None:
        installed = (Path(sys.executable).parent / "ninja").exists()
        missing.append("ninja is installed, but not on PATH" if installed else "no ninja")
    if not (folder / _OPERATOR / f"{_OPERATOR}.so").is_file():
        compilers = [os.environ.get("CXX"), "c++", "g++", "clang++"]
        if not any(shutil.which(compiler) for compiler in compilers if compiler):
            missing.append("no C++ compiler")
        if not _can_write(folder):
            missing.append(f"{folder} cannot be written")
        detail = "not compiled" if not missing else f"not compiled, and cannot be: {', '.join(missing)}"
        return Finding(what, "note", detail, _NOT_NEEDED)
    if missing:
        return Finding(what, "note", f"compiled, but {missing[0]}", _NOT_NEEDED)
    return Finding(what, "ok", f"compiled: {folder / _OPERATOR}")


def probe_timm() -> list[Finding]:
    """timm and torchvision, for networks that are not part of sopdist."""
    advice = (
        "for networks of timm: pip install timm torchvision, built for the same torch; other networks do not need them"
    )
    torchvision, vision = _import_package("torchvision", "torchvision", advice)
    if torchvision is not None:
        vision = Finding("torchvision", "ok", torchvision.__version__)
    elif vision.state == "broken":
        from ..models.torchvision_import import import_torchvision

        try:
            import_torchvision()
        except Exception as error:
            vision = Finding("torchvision", "broken", shorten(f"{type(error).__name__}: {error}"), advice)
        else:
            detail = f"{_version('torchvision')}: its compiled part does not match this torch"
            vision = Finding("torchvision", "note", detail, "nothing to do: no network of timm needs that part")
    timm, problem = _import_package("timm", "timm", advice)
    return [vision, problem if timm is None else Finding("timm", "ok", timm.__version__)]


def probe_wandb() -> list[Finding]:
    """Weights & Biases: whether it is installed, and whether runs would be online."""
    wandb, problem = _import_package("wandb", "W&B", "optional: pip install wandb, or log.wandb=off")
    if wandb is None:
        return [problem]
    mode = os.environ.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        return [Finding("W&B", "note", f"{wandb.__version__}, WANDB_MODE={mode}", "unset it to log online")]
    if _logged_in():
        return [Finding("W&B", "ok", f"{wandb.__version__}, logged in")]
    advice = "nothing to do: runs are logged offline, for `wandb sync`; or run `wandb login`"
    return [Finding("W&B", "note", f"{wandb.__version__}, not logged in", advice)]


def _logged_in() -> bool:
    """Whether there is an API key. The key itself is not read: only host names are taken from the file."""
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


def _import_package(module: str, what: str, advice: str, *, needed: bool = False) -> tuple[ModuleType | None, Finding]:
    """The module and "ok", or None and the reason why it cannot be imported."""
    try:
        return importlib.import_module(module), Finding(what, "ok", "")
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            return None, Finding(what, "missing", "not installed", advice, needed)
        return None, Finding(what, "broken", shorten(f"needs {error.name}, which is not installed"), advice, needed)
    except Exception as error:  # an import may raise anything
        return None, Finding(what, "broken", shorten(f"{type(error).__name__}: {error}"), advice, needed)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def _python_tag() -> str:
    return f"{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"


def _can_write(folder: Path) -> bool:
    """Whether the folder could be created and written, judged by its nearest existing parent."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
