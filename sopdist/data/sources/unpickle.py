"""A restricted unpickler for untrusted files: reads dictionaries of numbers, text and arrays, refuses everything else.

CIFAR is distributed as Python 2 pickles, CIFAR-N as `torch.save` files, which contain a pickle. A pickle is a program
that can call any function it names. Here it can name only four, and gets our stand-ins for them. NumPy's own code for
restoring arrays is never called, because it trusts its input: a forged dtype turns raw bytes into object pointers.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError

_MAX_BYTES = 1 << 30  # limit for a pickle in a zip, whose header may claim any size; CIFAR-N has 2.4 MB
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")  # dtypes without pointers, text or fields


def load_pickle(content: bytes, where: str) -> dict[str, Any]:
    """Read a pickled dictionary; `where` names the file in errors.

    Keys are returned as str, NumPy arrays as read-only arrays, Python 2 strings as bytes.
    """
    return _as_fields(_Unpickler(io.BytesIO(content), where).load(), where)


def load_torch(content: bytes, where: str) -> dict[str, Any]:
    """Read a dictionary of NumPy arrays written by `torch.save` in the zip format (torch >= 1.6)."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise DataError(
            f"{where}: not a torch.save file; download it again, or, if it was written by a torch before 1.6, load and "
            "save it with a later version"
        )
    return load_pickle(_zipped_pickle(content, where), where)


def _zipped_pickle(content: bytes, where: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [info for info in archive.infolist() if info.filename.split("/")[-1] == "data.pkl"]
            if len(members) != 1:
                raise DataError(f"{where}: a zip with {len(members)} data.pkl, not a torch.save file")
            if members[0].file_size > _MAX_BYTES:
                raise DataError(f"{where}: its data.pkl is larger than {_MAX_BYTES >> 30} GiB uncompressed")
            return archive.read(members[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise DataError(f"{where}: damaged zip ({error}); download it again") from None


def _as_fields(loaded: Any, where: str) -> dict[str, Any]:
    if type(loaded) is not dict:
        raise DataError(f"{where}: contains {type(loaded).__name__}, expected a dictionary")
    fields = {}
    for key, value in loaded.items():
        name = key.decode("latin1") if isinstance(key, bytes) else key  # written by Python 2
        if not isinstance(name, str):
            raise DataError(f"{where}: key {name!r}, expected text")
        fields[name] = value.array if isinstance(value, _Array) else value
    return fields


class _Unpickler(pickle.Unpickler):
    """Reads one pickle and turns every error into a DataError."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="bytes")  # Python 2 stored pixels as str
        self._where = where

    def load(self) -> Any:
        try:
            return super().load()
        except DataError as error:
            raise DataError(f"{self._where}: {error}") from None
        except Exception as error:  # invalid pickles can raise anything
            raise DataError(
                f"{self._where}: not a readable pickle ({type(error).__name__}: {error}); download it again"
            ) from None

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _ALLOWED.get((module, name))
        if stand_in is None:
            raise DataError(
                f"the pickle refers to {module}.{name}, which data files do not need; refused, nothing was executed. "
                "Download the file from its publisher"
            )
        return _Global(stand_in)

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - the interface of pickle
        raise DataError("contains tensors, expected NumPy arrays as in the published file")


class _Global:
    """Wraps a stand-in, so that the pickle can call it but cannot modify it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise DataError("the pickle tries to modify a function; refused")


class _Dtype:
    """Stand-in for numpy.dtype: a numeric type, whose byte order is set by __setstate__."""

    __slots__ = ("dtype",)

    def __init__(self, code: Any, *_align_and_copy: Any) -> None:
        text = _text(code)
        if not _NUMBERS.fullmatch(text):
            raise DataError(f"the pickle has an array of dtype {text!r}; only numbers are supported")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        _version, order, subarray, names, fields, *_sizes = state
        if not (subarray is None and names is None and fields is None):
            raise DataError("the pickle has an array of records; only numbers are supported")
        self.dtype = self.dtype.newbyteorder(_text(order))  # type: ignore[arg-type]


class _Array:
    """Stand-in for the empty array that numpy's _reconstruct creates, filled by __setstate__."""

    __slots__ = ("array",)

    def __init__(self, *_kind_shape_code: Any) -> None:
        self.array: NDArray[Any] = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, is_fortran, content = state
        if type(dtype) is not _Dtype or type(content) is not bytes:
            raise DataError("the pickle has an array of objects; only numbers are supported")
        # If the size does not match the shape, this raises ValueError. The shape alone never allocates memory.
        self.array = np.frombuffer(content, dtype.dtype).reshape(shape, order="F" if is_fortran else "C")


def _encode(text: Any, encoding: Any) -> bytes:
    """Stand-in for _codecs.encode: in old protocols, Python 3 writes bytes as text and calls it to restore them."""
    if type(text) is not str or _text(encoding) not in ("latin1", "latin-1"):
        raise DataError("the pickle uses an encoding other than latin1; refused")
    return text.encode("latin1")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if type(value) is not str:
        raise DataError(f"the pickle has {type(value).__name__}, expected a name")
    return value


def _ndarray(*_args: Any) -> Any:
    raise DataError("the pickle calls numpy.ndarray; refused")  # a valid pickle only passes it to _reconstruct


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # since NumPy 2
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}
