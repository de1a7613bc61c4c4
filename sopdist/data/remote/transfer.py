"""Bytes from far away: ranged pieces through fsspec, or the output of a command, with retries.

It knows addresses, not shards: what a file should contain is checked by whoever asked for it (remote.py). Whatever it
says, in a message or in the log, is free of user names, passwords and tokens.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import io
import logging
import os
import posixpath
import random
import re
import selectors
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ..errors import DataError, StoreError

log = logging.getLogger("sopdist.data")

PIPE = "pipe:"
MOST_UNKNOWN = 1 << 30  # a file whose size nobody told (manifest, index, labels) is refused beyond this
_PIECE = 8 << 20  # asked for at a time, so that a dropped connection costs no more
_LEAST_PIECE = 256 << 10
_LONGEST_PAUSE = 30.0
_SILENCE = 120.0  # seconds without a byte after which a transfer is given up
_POLL = 0.1  # how soon a transfer notices that it is to stop
_QUIET = 5.0  # seconds between two warnings about retries

_FOR_GOOD = (401, 403, 404, 405, 410, 416, 451)  # asking again would give the same answer
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")  # botocore's, without it


class MissingError(StoreError):
    """There is no such file there."""


class ClosedError(StoreError):
    """The transfer was told to stop."""


_USER = re.compile(r"(?<=://)[^\s'\"]*@")
_QUERY = re.compile(r"\?(?!\*\*\*)[^\s'\")>]+")
_NAMED = re.compile(
    r"(?i)((?:authorization|token|secret|passw\w*|signature|credential|access.?key|api.?key|key(?==))\w*['\"]?\s*[=:]\s*)"
    r"((?:bearer|basic)\s+)?[^\s'\"&]+"
)


def without_secrets(text: str) -> str:
    """`https://me:pass@host/a?sig=1` -> `https://***@host/a?***`; for every text that somebody may read."""
    return _NAMED.sub(r"\1***", _QUERY.sub("?***", _USER.sub("***@", text)))


class Transfer:
    """Fetches files below one address, given as URL or as `pipe:COMMAND` with `{}` for the file's name.

    Threads may share it. Setting `stop` ends every transfer within moments, with ClosedError.
    """

    def __init__(self, root: str, stop: threading.Event, retries: int = 5, backoff: float = 1.0) -> None:
        self.retried = 0
        self.received = 0  # bytes
        self._stop = stop
        self._retries = retries
        self._backoff = backoff  # seconds before the first retry; doubles with each
        self._lock = threading.Lock()
        self._last_warning = -_QUIET
        self._unsaid = 0
        self._is_http = root.startswith(("http://", "https://"))
        self._command: list[str] = []
        if root.startswith(PIPE):
            self._command = _words(root)
            # A command may carry secrets anywhere; its program and what stands around the name say enough.
            self.root = " ... ".join([PIPE + self._command[0], *map(without_secrets, re.findall(_AROUND_NAME, root))])
        else:
            self.root = without_secrets(root)
            self._fs, self._base = _open_filesystem(root, self.root, _http_options if self._is_http else dict)

    def address(self, name: str) -> str:
        """Where file `name` is, for messages."""
        if self._command:
            return f"{name} from {self.root}"
        return without_secrets(self._path(name) if self._is_http else f"{self.root.rstrip('/')}/{name}")

    def fetch(self, name: str, file: IO[bytes], size: int | None = None) -> str:
        """Write the file's content from the start of `file` and return its SHA-256; never more than `size` bytes.

        Raises MissingError, another DataError, ClosedError, or the OSError of writing to `file`.
        """
        arrival = _Arrival(file)
        if self._command:
            self._fetch_by_command(name, arrival, size)
        else:
            self._fetch_by_pieces(name, arrival, size)
        return arrival.digest.hexdigest()

    def fetch_bytes(self, name: str) -> bytes:
        """The content of a file of unknown size."""
        buffer = io.BytesIO()
        self.fetch(name, buffer)
        return buffer.getvalue()

    def list_names(self, folder: str) -> list[str]:
        """Names of the files in a folder, or nothing where it cannot be listed."""
        if self._command:
            return []
        try:
            entries = self._call("ls", self._path(folder), detail=False)
        except ClosedError:
            raise
        except Exception:  # whatever a file system raises when it does not list
            return []
        return sorted({unquote(posixpath.basename(urlsplit(str(entry)).path)) for entry in entries})

    def _path(self, name: str) -> str:
        if not self._is_http:
            return f"{self._base.rstrip('/')}/{name}"
        parts = urlsplit(self._base)  # a token in the query belongs behind the name
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}", fragment=""))

    def _fetch_by_pieces(self, name: str, arrival: _Arrival, size: int | None) -> None:
        path = self._path(name)
        piece, failures = _PIECE, 0
        while size is None or arrival.at < size:
            asked = piece if size is None else min(piece, size - arrival.at)
            try:
                body = self._call("cat_file", path, start=arrival.at, end=arrival.at + asked)
                if size is None:
                    size = self._size_behind(name, len(body), asked)
                if len(body) > asked:  # the server ignores ranges: this is all of it
                    if len(body) != size:
                        raise OSError(f"{len(body)} bytes came, expected {size}")
                    body = memoryview(body)[arrival.at :]
                elif not body and size:
                    raise OSError(f"ends after {arrival.at} of {size} bytes")
            except Exception as error:
                failures += 1
                self._pause_or_raise(name, error, failures)
                piece = max(piece // 2, _LEAST_PIECE)  # a connection that always breaks early still makes headway
                continue
            arrival.take(body)
            self._count(received=len(body))
            failures = 0
            if len(body) < asked and arrival.at < size:
                self._warn(f"{self.address(name)}: short read, going on at byte {arrival.at} of {size}")
            else:
                piece = min(piece * 2, _PIECE)

    def _size_behind(self, name: str, came: int, asked: int) -> int:
        """The size of a file of which nobody told it, after its first piece."""
        # Less than asked is all there is, more is from a server that ignores ranges. (A connection that broke is told
        # of by the file system; content that was cut without notice is found by whoever checks it.)
        size = came if came != asked else self._call("size", self._path(name))
        if size is None:
            raise OSError("the server does not tell its size")
        if size > MOST_UNKNOWN:
            raise DataError(f"{self.address(name)}: {size:,} bytes, far more than such a file has")
        return int(size)

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        """Call the file system, and give up as soon as the transfer is to stop."""
        if self._stop.is_set():
            raise ClosedError(f"{self.root}: closed")
        if not self._fs.async_impl:
            return getattr(self._fs, method)(path, **arguments)
        coroutine: Coroutine[Any, Any, Any] = getattr(self._fs, f"_{method}")(path, **arguments)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._fs.loop)
        while not concurrent.futures.wait([future], _POLL).done:
            if self._stop.is_set():
                future.cancel()
                raise ClosedError(f"{self.root}: closed")
        return future.result()

    def _fetch_by_command(self, name: str, arrival: _Arrival, size: int | None) -> None:
        failures = 0
        while True:
            arrival.restart()
            try:
                self._run(name, arrival, size)
                return
            except _CommandError as error:  # not OSError, which is about writing here
                failures += 1
                self._pause_or_raise(name, error, failures)

    def _run(self, name: str, arrival: _Arrival, size: int | None) -> None:
        most = MOST_UNKNOWN if size is None else size
        with tempfile.TemporaryFile() as complaints, selectors.DefaultSelector() as selector:
            try:
                process = subprocess.Popen(
                    [word.replace("{}", name) for word in self._command],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints,
                    start_new_session=True,  # so that what it starts can be ended with it
                )  # fmt: skip
            except OSError as error:
                raise DataError(f"{self.root}: cannot run {self._command[0]!r}: {error.strerror}") from None
            output = process.stdout
            assert output is not None
            try:
                selector.register(output, selectors.EVENT_READ)
                heard = time.monotonic()
                while True:
                    if self._stop.is_set():
                        raise ClosedError(f"{self.root}: closed")
                    if time.monotonic() - heard > _SILENCE:
                        raise _CommandError(f"sent nothing for {_SILENCE:.0f} s")
                    if not selector.select(_POLL):
                        continue
                    chunk = os.read(output.fileno(), 1 << 20)
                    if not chunk:
                        break
                    heard = time.monotonic()
                    self._count(received=len(chunk))
                    if arrival.at + len(chunk) > most:
                        raise _CommandError(f"sends more than {most:,} bytes")
                    arrival.take(chunk)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_SILENCE)
            finally:
                output.close()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode:
                complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - 2000))
                said = " ".join(without_secrets(complaints.read().decode(errors="replace")).split())
                raise _CommandError(f"exit code {process.returncode}: {said[-300:] or 'no message'}")
            if size is not None and arrival.at < size:
                raise _CommandError(f"sent {arrival.at:,} of {size:,} bytes")

    def _pause_or_raise(self, name: str, error: Exception, failures: int) -> None:
        """After a failure: wait for the next try, or raise what a person should read."""
        if isinstance(error, DataError) and not isinstance(error, _CommandError):
            raise error
        status = getattr(error, "status" if hasattr(error, "status") else "code", None)  # aiohttp's, gcsfs's
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, _CommandError):
            reason = str(error)
        elif isinstance(status, int) and status >= 400:
            reason = f"HTTP {status} {getattr(error, 'message', '')}".strip()
        reason = without_secrets(reason)
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise MissingError(f"{self.address(name)}: not found; is the address right?") from None
        if isinstance(error, PermissionError) or status in (401, 403):
            raise DataError(f"{self.address(name)}: access denied ({reason}); check the credentials") from None
        if status in _FOR_GOOD or isinstance(error, _OURS) or type(error).__name__ in _NO_CREDENTIALS:
            raise DataError(f"{self.address(name)}: {reason}") from None
        if failures > self._retries:
            raise DataError(f"{self.address(name)}: {reason}; given up after {failures} tries") from None
        longest = min(self._backoff * 2 ** (failures - 1), _LONGEST_PAUSE)
        pause = longest * random.uniform(0.5, 1.0)  # spread, so that ranks do not come back all at once
        self._warn(f"{self.address(name)}: {reason}; try {failures + 1} of {self._retries + 1} in {pause:.1f} s")
        if self._stop.wait(pause):
            raise ClosedError(f"{self.root}: closed") from None

    def _warn(self, text: str) -> None:
        """Count a retry and log it, but not many a second."""
        with self._lock:
            self.retried += 1
            if time.monotonic() - self._last_warning < _QUIET:
                self._unsaid += 1
                return
            unsaid, self._unsaid = self._unsaid, 0
            self._last_warning = time.monotonic()
        log.warning("%s%s", text, f" ({unsaid} more retries since the last warning)" if unsaid else "")

    def _count(self, received: int) -> None:
        with self._lock:
            self.received += received


class _Arrival:
    """What has come of a file: written and summed up on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.restart()

    def restart(self) -> None:
        """Forget what came; the file keeps its length, which is its place in the cache."""
        self._file.seek(0)
        self.at = 0
        self.digest = hashlib.sha256()

    def take(self, content: bytes | memoryview) -> None:
        rest = memoryview(content)
        self.digest.update(rest)
        self.at += len(rest)
        while rest:  # an unbuffered file may take less than it is given
            rest = rest[self._file.write(rest) :]


class _CommandError(DataError):
    """A command did not deliver; the message says how."""


_OURS = (ImportError, NotImplementedError, TypeError, ValueError)  # a wrong request, not a bad connection
_AROUND_NAME = r"[^\s'\"]*\{\}[^\s'\"]*"


def _words(root: str) -> list[str]:
    example = "write e.g. pipe:aws s3 cp s3://bucket/train/{} -"
    try:
        words = shlex.split(root.removeprefix(PIPE))
    except ValueError as error:
        raise DataError(f"{PIPE}... cannot be split into words ({error}); {example}") from None
    if not any("{}" in word for word in words[1:]):
        raise DataError(f"{PIPE}{words[0] if words else ''}: has no {{}} where the file's name goes; {example}")
    return words


def _open_filesystem(root: str, shown: str, options: Callable[[], dict[str, Any]]) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the URL's path in it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise DataError(f"{shown}: remote data needs fsspec: pip install 'sopdist[data]'") from None
    try:
        fs, base = url_to_fs(root, **options())
    except ImportError as error:
        package = getattr(error.__cause__ or error, "name", None) or "fsspec[full]"
        scheme = root.split("://")[0]
        raise DataError(f"{shown}: reading {scheme}:// needs a package: pip install '{package}'") from None
    except Exception as error:  # unknown protocol, or whatever a backend's constructor raises
        raise DataError(f"{shown}: cannot be opened: {without_secrets(str(error))}") from None
    return fs, str(base)


def _http_options() -> dict[str, Any]:
    import aiohttp

    # No limit for a whole transfer, which may be long, but for the silence in it. Proxies and .netrc are honoured.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_SILENCE)
    # Ranges and sizes are those of the file as it is stored, not of a compressed copy.
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}, "headers": {"Accept-Encoding": "identity"}}
