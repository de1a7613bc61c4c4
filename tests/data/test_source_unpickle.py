"""The restricted unpickler: it reads files of Python 2, Python 3 and torch, and executes nothing."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sopdist.data.sources.unpickle import load_pickle, load_torch
from sopdist.errors import DataError


def python2_pickle(value: Any) -> bytes:
    """Protocol 2 as written by Python 2, where text and bytes are one type; Python 3 cannot write this."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, str | bytes):
        text = value.encode("latin1") if isinstance(value, str) else value
        return (b"U" + bytes([len(text)]) if len(text) < 256 else b"T" + struct.pack("<i", len(text))) + text
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if value is None:
        return b"N"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_python2, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(_python2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_python2(part) for item in value.items() for part in item) + b"u"
    assert isinstance(value, np.ndarray)
    ndarray = b"cnumpy\nndarray\n"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(" + ndarray + _python2((0,)) + _python2("b") + b"tR"
    order = "|" if value.dtype.itemsize == 1 else "<"
    dtype = b"cnumpy\ndtype\n" + _python2((value.dtype.str[1:], 0, 1)) + b"R"
    dtype += _python2((3, order, None, None, None, -1, -1, 0)) + b"b"
    fields = _python2(1) + _python2(value.shape) + dtype + _python2(False) + _python2(value.tobytes())
    return empty + b"(" + fields + b"tb"


def torch_file(value: Any, legacy: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=not legacy)
    return buffer.getvalue()


PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 12)
LABELS = np.array([3, -1, 2**40])


def test_python_itself_can_read_the_fixtures() -> None:
    content = python2_pickle({"data": PIXELS, "labels": [6, 9], "filenames": ["a.png", "b" * 300], "n": LABELS})
    fields = pickle.Unpickler(io.BytesIO(content), encoding="latin1").load()
    assert (fields["data"] == PIXELS).all()
    assert (fields["n"] == LABELS).all()
    assert (fields["labels"], fields["filenames"]) == ([6, 9], ["a.png", "b" * 300])


def variants() -> dict[str, bytes]:
    fields = {"data": PIXELS, "labels": [6, 9], "n": LABELS}
    ours = {f"protocol {number}": pickle.dumps(fields, protocol=number) for number in range(5)}
    as_bytes = pickle.dumps({key.encode(): value for key, value in fields.items()}, protocol=2)
    numpy1 = ours["protocol 2"].replace(b"numpy._core", b"numpy.core")
    return {**ours, "python 2": python2_pickle(fields), "bytes as keys": as_bytes, "NumPy 1": numpy1}


@pytest.mark.parametrize("variant", variants())
def test_arrays_lists_and_keys_are_read_from_every_writer(variant: str) -> None:
    fields = load_pickle(variants()[variant], "file")
    assert list(fields) == ["data", "labels", "n"]
    assert fields["labels"] == [6, 9]
    for key, expected in (("data", PIXELS), ("n", LABELS)):
        assert fields[key].dtype == expected.dtype
        assert np.array_equal(fields[key], expected)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(PIXELS.astype(np.int16)),
        PIXELS.astype(">i4"),
        PIXELS > 3,
        PIXELS.astype(np.float32),
        np.array(7),
    ],
    ids=["fortran", "big endian", "bool", "float", "no axis"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_memory_layouts_of_arrays_are_preserved(array: NDArray[Any], protocol: int) -> None:
    result = load_pickle(pickle.dumps({"a": array}, protocol=protocol), "file")["a"]
    assert result.dtype == array.dtype
    assert np.array_equal(result, array)


def test_arrays_saved_by_torch_are_read() -> None:
    fields = load_torch(torch_file({"clean_label": LABELS, "noisy_label": PIXELS}), "file")
    assert np.array_equal(fields["clean_label"], LABELS)
    assert np.array_equal(fields["noisy_label"], PIXELS)


def test_a_file_of_an_old_torch_is_refused_with_advice() -> None:
    with pytest.raises(DataError, match=r"^file: not a torch\.save file.*before 1\.6.*save it with a later version"):
        load_torch(torch_file({"clean_label": LABELS}, legacy=True), "file")


class Malicious:
    """Calls `function` when it is unpickled by the standard unpickler."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_executed(protocol: int, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    attack = Malicious(os.system, f"touch {marker}")
    content = pickle.dumps({"data": [attack]}, protocol=protocol)
    with pytest.raises(DataError, match=r"^file: the pickle refers to posix\.system.*nothing was executed"):
        load_pickle(content, "file")
    assert not marker.exists()
    pickle.Unpickler(io.BytesIO(content)).load()  # the attack works with the standard unpickler
    assert marker.exists()


def test_a_malicious_torch_file_is_refused_and_not_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    content = torch_file({"clean_label": LABELS, "x": Malicious(os.system, f"touch {marker}")})
    with pytest.raises(DataError, match=r"refers to posix\.system"):
        load_torch(content, "file")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Malicious(builtins.eval, "1"), "eval"),
        (Malicious(getattr, "a", "b"), "getattr"),
        (Malicious(np.load, "x"), "numpy.load"),
        (Malicious(np.dtype.newbyteorder, np.dtype("i4")), "getattr|newbyteorder"),
        (np.float64(3), "multiarray.scalar"),
        (OrderedDict(), "collections.OrderedDict"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_all_other_names_are_refused(value: Any, name: str, protocol: int) -> None:
    with pytest.raises(DataError, match=rf"the pickle refers to .*({name}), which"):
        load_pickle(pickle.dumps({"data": value}, protocol=protocol), "file")


OBJECT_DTYPE = b"cnumpy\ndtype\n(U\x02O8K\x00K\x01tR"
INT_DTYPE = b"cnumpy\ndtype\n(U\x02i8K\x00K\x01tR"
EMPTY = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_python2(np.zeros(1, np.int64)).replace(b"U\x02i8", b"U\x02O8"), "dtype 'O8'; only numbers"),
        # A dtype of objects that claims not to be one, so that NumPy would take the bytes for pointers.
        (OBJECT_DTYPE + _python2((3, "|", None, None, None, 8, 8, 0)) + b"b", "dtype 'O8'; only numbers"),
        (INT_DTYPE + _python2((3, "|", None, ("a",), {"a": 1}, 8, 8, 63)) + b"b", "an array of records"),
        (EMPTY + b"(K\x01K\x01\x85" + INT_DTYPE + b"\x89](K\x01etb", "an array of objects"),
        (EMPTY + b"(K\x01K\x01\x85U\x02i8\x89U\x08" + bytes(8) + b"tb", "an array of objects"),
        (EMPTY + b"(K\x01J\xff\xff\xff\x7f\x85" + INT_DTYPE + b"\x89U\x08" + bytes(8) + b"tb", "ValueError"),
        (b"cnumpy\nndarray\n(K\x05\x85tR", "calls numpy.ndarray"),
        (b"c_codecs\nencode\n}U\x01aU\x01bsb", "tries to modify a function"),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00aU\x04rot1tR", "other than latin1"),
        (b"Pwhere\n", "contains tensors"),
    ],
)
def test_forged_arrays_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^file: .*{message}"):
        load_pickle(b"\x80\x02}U\x04data" + body + b"s.", "file")


def test_real_object_arrays_are_refused() -> None:
    with pytest.raises(DataError, match="only numbers are supported"):
        load_pickle(pickle.dumps({"data": np.array([None, "x"])}, protocol=2), "file")


def test_a_file_truncated_anywhere_raises_a_data_error() -> None:
    content = python2_pickle({"data": PIXELS, "labels": [6, 9]})
    for length in range(len(content)):
        with pytest.raises(DataError, match=r"^file: "):
            load_pickle(content[:length], "file")
    content = torch_file({"clean_label": LABELS})
    for length in range(0, len(content) - 64, 7):
        with pytest.raises(DataError, match=r"^file: "):
            load_torch(content[:length], "file")


@pytest.mark.parametrize("value", [[1, 2], 5, {1: 2}, {("a",): 1}])
def test_only_dictionaries_with_text_keys_are_accepted(value: Any) -> None:
    with pytest.raises(DataError, match="expected"):
        load_pickle(pickle.dumps(value, protocol=2), "file")


def test_files_with_tensors_and_other_zips_are_refused() -> None:
    with pytest.raises(DataError, match=r"contains tensors|refers to torch"):
        load_torch(torch_file({"clean_label": torch.zeros(3)}), "file")
    with pytest.raises(DataError, match=r"not a torch\.save file"):
        load_torch(pickle.dumps({"clean_label": [1]}), "file")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("readme.txt", "x")
    with pytest.raises(DataError, match=r"a zip with 0 data\.pkl"):
        load_torch(buffer.getvalue(), "file")
