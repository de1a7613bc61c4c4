"""Pickles from strangers: dictionaries of numbers, text and arrays are read, anything else is refused unexecuted.

CIFAR comes as pickles of Python 2, CIFAR-N as `torch.save` files, which hold a pickle. A pickle is a program that may
call whatever it names. Here it can name four things, and gets stand-ins for them: NumPy's own code for restoring
arrays never sees its input, because that trusts it (a forged dtype turns raw bytes into object pointers).
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

from ..errors import DataError

_MAX_BYTES = 1 << 30  # of a pickle in a zip, which may claim anything; CIFAR-N has 2.4 MB
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")  # dtypes without pointers, text or fields


def load_pickle(content: bytes, where: str) -> dict[str, Any]:
    """Read a pickled dictionary; `where` names the file in errors.

    Its keys become text, its NumPy arrays are arrays (read-only), text of Python 2 stays bytes.
    """
    return _as_fields(_Unpickler(io.BytesIO(content), where).load(), where)


def load_torch(content: bytes, where: str) -> dict[str, Any]:
    """Read a dictionary of NumPy arrays that `torch.save` wrote, since torch 1.6, as a zip."""
    if not zipfile.is_zipfile(io.BytesIO(content)):
        raise DataError(
            f"{where}: not a file of torch.save; download it again, or, if a torch before 1.6 wrote it, load and save "
            "it with a later one"
        )
    return load_pickle(_zipped_pickle(content, where), where)


def _zipped_pickle(content: bytes, where: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [info for info in archive.infolist() if info.filename.split("/")[-1] == "data.pkl"]
            if len(members) != 1:
                raise DataError(f"{where}: a zip with {len(members)} data.pkl, not a file of torch.save")
            if members[0].file_size > _MAX_BYTES:
                raise DataError(f"{where}: its data.pkl is larger than {_MAX_BYTES >> 30} GiB unpacked")
            return archive.read(members[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise DataError(f"{where}: damaged zip ({error}); download it again") from None


def _as_fields(loaded: Any, where: str) -> dict[str, Any]:
    if type(loaded) is not dict:
        raise DataError(f"{where}: holds {type(loaded).__name__}, expected a dictionary")
    fields = {}
    for key, value in loaded.items():
        name = key.decode("latin1") if isinstance(key, bytes) else key  # written by Python 2
        if not isinstance(name, str):
            raise DataError(f"{where}: has {name!r} as a key, expected text")
        fields[name] = value.array if isinstance(value, _Array) else value
    return fields


class _Unpickler(pickle.Unpickler):
    """Reads one pickle; whatever goes wrong inside it is a DataError."""

    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="bytes")  # Python 2 kept pixels in what Python 3 takes for text
        self._where = where

    def load(self) -> Any:
        try:
            return super().load()
        except DataError as error:
            raise DataError(f"{self._where}: {error}") from None
        except Exception as error:  # bytes that are not a pickle can raise anything
            raise DataError(
                f"{self._where}: not a readable pickle ({type(error).__name__}: {error}); download it again"
            ) from None

    def find_class(self, module: str, name: str) -> Any:
        stand_in = _ALLOWED.get((module, name))
        if stand_in is None:
            raise DataError(
                f"the pickle asks for {module}.{name}, which data has no need of; refused, nothing was executed. "
                "Get the file from its publisher"
            )
        return _Global(stand_in)

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002 - the interface of pickle
        raise DataError("holds tensors, expected NumPy arrays as in the published file")


class _Global:
    """What the pickle gets for a name: to be called, not to be changed."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *args: Any) -> Any:
        return self._make(*args)

    def __setstate__(self, state: Any) -> None:
        raise DataError("the pickle tries to change a function; refused")


class _Dtype:
    """Stands in for numpy.dtype: a kind of number, and then its byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: Any, *_align_and_copy: Any) -> None:
        text = _text(code)
        if not _NUMBERS.fullmatch(text):
            raise DataError(f"the pickle has an array of dtype {text!r}; only numbers are read")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        _version, order, subarray, names, fields, *_sizes = state
        if not (subarray is None and names is None and fields is None):
            raise DataError("the pickle has an array of records; only numbers are read")
        self.dtype = self.dtype.newbyteorder(_text(order))  # type: ignore[arg-type]


class _Array:
    """Stands in for the array that numpy's _reconstruct makes empty, to be filled by its state."""

    __slots__ = ("array",)

    def __init__(self, *_kind_shape_code: Any) -> None:
        self.array: NDArray[Any] = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, is_fortran, content = state
        if type(dtype) is not _Dtype or type(content) is not bytes:
            raise DataError("the pickle has an array of objects; only numbers are read")
        # A size that does not fit the shape is a ValueError, and memory is never taken by the shape alone.
        self.array = np.frombuffer(content, dtype.dtype).reshape(shape, order="F" if is_fortran else "C")


def _encode(text: Any, encoding: Any) -> bytes:
    """Python 3 writes bytes as text in the old protocols, and calls this to get them back."""
    if type(text) is not str or _text(encoding) not in ("latin1", "latin-1"):
        raise DataError("the pickle encodes text other than as latin1; refused")
    return text.encode("latin1")


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if type(value) is not str:
        raise DataError(f"the pickle has {type(value).__name__} where a name must be")
    return value


def _ndarray(*_args: Any) -> Any:
    raise DataError("the pickle calls numpy.ndarray; refused")  # it is only ever passed on to _reconstruct


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,  # since NumPy 2
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}
