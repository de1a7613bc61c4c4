"""What has to be installed for the demo. Imports none of it, so that whatever is missing can be told."""

from __future__ import annotations

import importlib.util

from ..data.errors import DataError

ALWAYS = ("sklearn", "PIL", "yaml", "safetensors", "accelerate")
OF_LAUNCHER = {"deepspeed": ("deepspeed", "transformers"), "torchrun": ()}


def check_installed(launcher: str) -> None:
    """DataError, with what to do, if the launcher, its engine or anything else is missing."""
    missing = [name for name in (*ALWAYS, *OF_LAUNCHER[launcher]) if importlib.util.find_spec(name) is None]
    if missing:
        other = "; --launcher torchrun does without DeepSpeed" if launcher == "deepspeed" else ""
        raise DataError(
            f"the demo with {launcher} needs {', '.join(missing)}: `make env` installs everything in the right order; "
            f"or, after torch, setuptools and ninja: pip install --no-build-isolation 'sopdist[demo,data,train]'{other}"
        )
