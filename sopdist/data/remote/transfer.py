"""Downloads files, as byte ranges through fsspec or as the output of a command, with retries.

It knows addresses, not shards: the caller (store.py) checks the contents of a file. Its error messages and log lines
never contain user names, passwords or tokens.
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

from ...errors import DataError, StoreError

log = logging.getLogger("sopdist.data")

PIPE = "pipe:"
MAX_UNKNOWN_SIZE = 1 << 30  # bytes; larger files are refused if their size is not in the manifest
_CHUNK = 8 << 20  # bytes per request, and the most that a dropped connection can cost
_MIN_CHUNK = 256 << 10
_MAX_PAUSE = 30.0  # seconds between two attempts
_IDLE_TIMEOUT = 120.0  # seconds without data after which a transfer is aborted
_POLL = 0.1  # seconds between checks of whether to stop
_WARNING_INTERVAL = 5.0  # seconds between two warnings about retries

_PERMANENT = (401, 403, 404, 405, 410, 416, 451)  # HTTP statuses that are not worth a retry
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")  # of botocore, by name


class MissingError(StoreError):
    """The remote file does not exist."""


class ClosedError(StoreError):
    """The transfer was stopped by `close`."""


_USER = re.compile(r"(?<=://)[^\s'\"]*@")
_QUERY = re.compile(r"\?(?!\*\*\*)[^\s'\")>]+")
_NAMED = re.compile(
    r"(?i)((?:authorization|token|secret|passw\w*|signature|credential|access.?key|api.?key|key(?==))\w*['\"]?\s*[=:]\s*)"
    r"((?:bearer|basic)\s+)?[^\s'\"&]+"
)


def redact_secrets(text: str) -> str:
    """`https://me:pass@host/a?sig=1` -> `https://***@host/a?***`. Apply it to all text that users may see."""
    return _NAMED.sub(r"\1***", _QUERY.sub("?***", _USER.sub("***@", text)))


class Transfer:
    """Fetches files below one address: a URL, or `pipe:COMMAND` with `{}` for the name of the file.

    Threads may share it. Setting `stop` aborts every transfer almost immediately, with ClosedError.
    """

    def __init__(self, root: str, stop: threading.Event, retries: int = 5, backoff: float = 1.0) -> None:
        self.retried = 0
        self.received = 0  # bytes
        self._stop = stop
        self._retries = retries
        self._backoff = backoff  # seconds before the first retry; doubles with each
        self._lock = threading.Lock()
        self._last_warning = -_WARNING_INTERVAL
        self._suppressed = 0
        self._is_http = root.startswith(("http://", "https://"))
        self._command: list[str] = []
        if root.startswith(PIPE):
            self._command = _words(root)
            # A command may contain secrets anywhere, so show only its program and the words that contain {}.
            self.root = " ... ".join([PIPE + self._command[0], *map(redact_secrets, re.findall(_AROUND_NAME, root))])
        else:
            self.root = redact_secrets(root)
            self._fs, self._base = _open_filesystem(root, self.root, _http_options if self._is_http else dict)

    def address(self, name: str) -> str:
        """The address of file `name`, for messages."""
        if self._command:
            return f"{name} from {self.root}"
        return redact_secrets(self._path(name) if self._is_http else f"{self.root.rstrip('/')}/{name}")

    def fetch(self, name: str, file: IO[bytes], size: int | None = None) -> str:
        """Write the contents to `file`, from its start, at most `size` bytes. Returns their SHA-256.

        Raises MissingError, ClosedError or another DataError, or an OSError if writing to `file` fails.
        """
        download = _Download(file)
        if self._command:
            self._fetch_with_command(name, download, size)
        else:
            self._fetch_in_chunks(name, download, size)
        return download.digest.hexdigest()

    def fetch_bytes(self, name: str) -> bytes:
        """The contents of a file of unknown size."""
        buffer = io.BytesIO()
        self.fetch(name, buffer)
        return buffer.getvalue()

    def list_names(self, folder: str) -> list[str]:
        """The names of the files in a folder. Empty if it cannot be listed."""
        if self._command:
            return []
        try:
            entries = self._call("ls", self._path(folder), detail=False)
        except ClosedError:
            raise
        except Exception:  # file systems that do not support listing raise various errors
            return []
        return sorted({unquote(posixpath.basename(urlsplit(str(entry)).path)) for entry in entries})

    def _path(self, name: str) -> str:
        if not self._is_http:
            return f"{self._base.rstrip('/')}/{name}"
        parts = urlsplit(self._base)  # the query, which may hold a token, stays after the name
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}", fragment=""))

    def _fetch_in_chunks(self, name: str, download: _Download, size: int | None) -> None:
        path = self._path(name)
        chunk, failures = _CHUNK, 0
        while size is None or download.at < size:
            requested = chunk if size is None else min(chunk, size - download.at)
            try:
                body = self._call("cat_file", path, start=download.at, end=download.at + requested)
                if size is None:
                    size = self._find_size(name, len(body), requested)
                if len(body) > requested:  # the server ignores ranges and sent the complete file
                    if len(body) != size:
                        raise OSError(f"received {len(body)} bytes, expected {size}")
                    body = memoryview(body)[download.at :]
                elif not body and size:
                    raise OSError(f"ends after {download.at} of {size} bytes")
            except Exception as error:
                failures += 1
                self._pause_or_raise(name, error, failures)
                chunk = max(chunk // 2, _MIN_CHUNK)  # so that a connection that always breaks early makes progress
                continue
            download.append(body)
            self._count(received=len(body))
            failures = 0
            if len(body) < requested and download.at < size:
                self._warn(f"{self.address(name)}: short read, continuing at byte {download.at} of {size}")
            else:
                chunk = min(chunk * 2, _CHUNK)

    def _find_size(self, name: str, received: int, requested: int) -> int:
        """The size of a file that is not in the manifest, given the length of its first chunk."""
        # Fewer bytes than requested are the complete file; more come from a server that ignores ranges. (The file
        # system reports broken connections, and the caller detects truncated contents.)
        size = received if received != requested else self._call("size", self._path(name))
        if size is None:
            raise OSError("the server does not report its size")
        if size > MAX_UNKNOWN_SIZE:
            raise DataError(f"{self.address(name)}: {size:,} bytes, far too large for such a file")
        return int(size)

    def _call(self, method: str, path: str, **arguments: Any) -> Any:
        """Call a method of the file system, and abort as soon as `stop` is set."""
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

    def _fetch_with_command(self, name: str, download: _Download, size: int | None) -> None:
        failures = 0
        while True:
            download.restart()
            try:
                self._run(name, download, size)
                return
            except _CommandError as error:  # not OSError, which means that writing failed
                failures += 1
                self._pause_or_raise(name, error, failures)

    def _run(self, name: str, download: _Download, size: int | None) -> None:
        limit = MAX_UNKNOWN_SIZE if size is None else size
        with tempfile.TemporaryFile() as stderr, selectors.DefaultSelector() as selector:
            try:
                process = subprocess.Popen(
                    [word.replace("{}", name) for word in self._command],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
                    start_new_session=True,  # so that its children can be killed with it
                )  # fmt: skip
            except OSError as error:
                raise DataError(f"{self.root}: cannot run {self._command[0]!r}: {error.strerror}") from None
            output = process.stdout
            assert output is not None
            try:
                selector.register(output, selectors.EVENT_READ)
                last_data = time.monotonic()
                while True:
                    if self._stop.is_set():
                        raise ClosedError(f"{self.root}: closed")
                    if time.monotonic() - last_data > _IDLE_TIMEOUT:
                        raise _CommandError(f"sent nothing for {_IDLE_TIMEOUT:.0f} s")
                    if not selector.select(_POLL):
                        continue
                    chunk = os.read(output.fileno(), 1 << 20)
                    if not chunk:
                        break
                    last_data = time.monotonic()
                    self._count(received=len(chunk))
                    if download.at + len(chunk) > limit:
                        raise _CommandError(f"sends more than {limit:,} bytes")
                    download.append(chunk)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_IDLE_TIMEOUT)
            finally:
                output.close()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode:
                stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - 2000))
                message = " ".join(redact_secrets(stderr.read().decode(errors="replace")).split())
                raise _CommandError(f"exit code {process.returncode}: {message[-300:] or 'no message'}")
            if size is not None and download.at < size:
                raise _CommandError(f"sent {download.at:,} of {size:,} bytes")

    def _pause_or_raise(self, name: str, error: Exception, failures: int) -> None:
        """After a failure: wait before the next attempt, or raise an error that a user can act on."""
        if isinstance(error, DataError) and not isinstance(error, _CommandError):
            raise error
        status = getattr(error, "status" if hasattr(error, "status") else "code", None)  # aiohttp's, gcsfs's
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, _CommandError):
            reason = str(error)
        elif isinstance(status, int) and status >= 400:
            reason = f"HTTP {status} {getattr(error, 'message', '')}".strip()
        reason = redact_secrets(reason)
        if isinstance(error, FileNotFoundError) or status in (404, 410):
            raise MissingError(f"{self.address(name)}: not found; is the address right?") from None
        if isinstance(error, PermissionError) or status in (401, 403):
            raise DataError(f"{self.address(name)}: access denied ({reason}); check the credentials") from None
        if status in _PERMANENT or isinstance(error, _CALLER_ERRORS) or type(error).__name__ in _NO_CREDENTIALS:
            raise DataError(f"{self.address(name)}: {reason}") from None
        if failures > self._retries:
            raise DataError(f"{self.address(name)}: {reason}; gave up after {failures} attempts") from None
        longest = min(self._backoff * 2 ** (failures - 1), _MAX_PAUSE)
        pause = longest * random.uniform(0.5, 1.0)  # jitter, so that the ranks do not retry all at once
        self._warn(f"{self.address(name)}: {reason}; attempt {failures + 1} of {self._retries + 1} in {pause:.1f} s")
        if self._stop.wait(pause):
            raise ClosedError(f"{self.root}: closed") from None

    def _warn(self, text: str) -> None:
        """Count a retry, and log it unless another one was logged just before."""
        with self._lock:
            self.retried += 1
            if time.monotonic() - self._last_warning < _WARNING_INTERVAL:
                self._suppressed += 1
                return
            suppressed, self._suppressed = self._suppressed, 0
            self._last_warning = time.monotonic()
        log.warning("%s%s", text, f" ({suppressed} more retries since the last warning)" if suppressed else "")

    def _count(self, received: int) -> None:
        with self._lock:
            self.received += received


class _Download:
    """The received part of a file, which is written and hashed as it arrives."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.restart()

    def restart(self) -> None:
        """Start again from the first byte. The file keeps its length, which reserves its space in the cache."""
        self._file.seek(0)
        self.at = 0
        self.digest = hashlib.sha256()

    def append(self, content: bytes | memoryview) -> None:
        """Write and hash the next bytes."""
        rest = memoryview(content)
        self.digest.update(rest)
        self.at += len(rest)
        while rest:  # an unbuffered file may write less than it is given
            rest = rest[self._file.write(rest) :]


class _CommandError(DataError):
    """A command failed. The message is the reason."""


_CALLER_ERRORS = (
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
)  # errors of a wrong call, not of a bad connection
_AROUND_NAME = r"[^\s'\"]*\{\}[^\s'\"]*"


def _words(root: str) -> list[str]:
    example = "write, for example, pipe:aws s3 cp s3://bucket/train/{} -"
    try:
        words = shlex.split(root.removeprefix(PIPE))
    except ValueError as error:
        raise DataError(f"{PIPE}... cannot be split into words ({error}); {example}") from None
    if not any("{}" in word for word in words[1:]):
        raise DataError(f"{PIPE}{words[0] if words else ''}: has no {{}} in place of the file name; {example}")
    return words


def _open_filesystem(root: str, shown: str, options: Callable[[], dict[str, Any]]) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it."""
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
    except Exception as error:  # an unknown protocol, or any error of a backend's constructor
        raise DataError(f"{shown}: cannot be opened: {redact_secrets(str(error))}") from None
    return fs, str(base)


def _http_options() -> dict[str, Any]:
    import aiohttp

    # A transfer may take any time, but not idle for too long. trust_env honours proxies and .netrc.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=_IDLE_TIMEOUT)
    # Ranges and sizes must refer to the stored file, not to a compressed copy.
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}, "headers": {"Accept-Encoding": "identity"}}
