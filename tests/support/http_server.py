"""A real HTTP server on localhost that serves a folder, with faults on demand."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections import Counter, defaultdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

DROP = "drop"  # half of the body, then a connection reset
CUT = "cut"  # half of the body, then a regular close, before Content-Length is reached
CLIP = "clip"  # a valid response with half of the requested bytes
WRONG = "wrong"  # the right number of wrong bytes
HANG = "hang"  # half of the body, then nothing until the server is closed


class Server:
    """`with Server(folder) as server`: `server.url` is the folder's address."""

    def __init__(self, folder: Path, ranges: bool = True) -> None:
        self.folder = folder
        self.ranges = ranges
        self.listing = True
        self.faults: dict[str, list[str | int]] = defaultdict(list)  # by path: consumed one per request
        self.always: dict[str, str | int] = {}  # by path: applied to every request
        self.log: list[str] = []  # requested paths, in order
        self.queries: set[str] = set()
        self.authorizations: set[str | None] = set()
        self.hanging = threading.Event()  # a client is stuck in HANG
        self.closing = threading.Event()
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def requests(self) -> Counter[str]:
        with self.lock:
            return Counter(self.log)

    @property
    def tars(self) -> list[str]:
        """Shards in the order in which they were first requested."""
        with self.lock:
            return list(dict.fromkeys(path for path in self.log if path.endswith(".tar")))

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each response takes 40 ms
    owner: Server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path).lstrip("/")
        with self.owner.lock:
            self.owner.log.append(path)
            self.owner.queries.add(parts.query)
            self.owner.authorizations.add(self.headers["Authorization"])
            queued = self.owner.faults[path]
            fault = queued.pop(0) if queued else self.owner.always.get(path)
        file = self.owner.folder / path
        if isinstance(fault, int):
            self._respond(HTTPStatus(fault), b"requested failure")
        elif file.is_dir() and self.owner.listing:
            links = "".join(f'<a href="{child.name}">{child.name}</a>' for child in sorted(file.iterdir()))
            self._respond(HTTPStatus.OK, links.encode(), kind="text/html")
        elif not file.is_file():
            self._respond(HTTPStatus.NOT_FOUND, b"")
        else:
            self._serve(file.read_bytes(), fault)

    do_HEAD = do_GET  # noqa: N815

    def _serve(self, content: bytes, fault: str | None) -> None:
        status, headers = HTTPStatus.OK, {}
        requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if fault == WRONG:
            content = bytes(byte ^ 0xFF for byte in content)
        if requested and self.owner.ranges:
            first, last = int(requested[1]), min(int(requested[2]), len(content) - 1)
            if first > last:
                self._respond(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"")
                return
            if fault == CLIP:
                last = (first + last) // 2
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            status, content = HTTPStatus.PARTIAL_CONTENT, content[first : last + 1]
        self._respond(status, content, headers=headers, fault=fault)

    def _respond(
        self,
        status: HTTPStatus,
        body: bytes,
        kind: str = "application/octet-stream",
        headers: dict[str, str] | None = None,
        fault: str | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault not in (DROP, CUT, HANG):
            self.wfile.write(body)
            return
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        if fault == HANG:
            self.owner.hanging.set()
            self.owner.closing.wait()
        if fault == DROP:  # closing with a linger time of 0 sends a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Quiet."""
