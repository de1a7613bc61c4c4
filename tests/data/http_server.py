"""A real HTTP server on loopback that serves a folder, and misbehaves when told to."""

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

DROP = "drop"  # half of the body, then the connection is reset
CUT = "cut"  # half of the body, then the connection ends in good order, too early for its Content-Length
CLIP = "clip"  # a valid answer with half of the bytes that were asked for
WRONG = "wrong"  # the right number of wrong bytes
HANG = "hang"  # half of the body, then nothing until the server is closed


class Server:
    """`with Server(folder) as server`: `server.url` is the folder's address."""

    def __init__(self, folder: Path, ranges: bool = True) -> None:
        self.folder = folder
        self.ranges = ranges
        self.listing = True
        self.faults: dict[str, list[str | int]] = defaultdict(list)  # by path: used up one a request
        self.always: dict[str, str | int] = {}  # by path: at each request
        self.log: list[str] = []  # paths, in the order of requests
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
        """Shards in the order in which they were first asked for."""
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
    disable_nagle_algorithm = True  # or each answer takes 40 ms
    owner: Server

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path).lstrip("/")
        with self.owner.lock:
            self.owner.log.append(path)
            self.owner.queries.add(parts.query)
            self.owner.authorizations.add(self.headers["Authorization"])
            waiting = self.owner.faults[path]
            fault = waiting.pop(0) if waiting else self.owner.always.get(path)
        file = self.owner.folder / path
        if isinstance(fault, int):
            self._answer(HTTPStatus(fault), b"told to fail")
        elif file.is_dir() and self.owner.listing:
            links = "".join(f'<a href="{child.name}">{child.name}</a>' for child in sorted(file.iterdir()))
            self._answer(HTTPStatus.OK, links.encode(), kind="text/html")
        elif not file.is_file():
            self._answer(HTTPStatus.NOT_FOUND, b"")
        else:
            self._serve(file.read_bytes(), fault)

    do_HEAD = do_GET  # noqa: N815

    def _serve(self, content: bytes, fault: str | None) -> None:
        status, headers = HTTPStatus.OK, {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if fault == WRONG:
            content = bytes(byte ^ 0xFF for byte in content)
        if asked and self.owner.ranges:
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            if first > last:
                self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"")
                return
            if fault == CLIP:
                last = (first + last) // 2
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            status, content = HTTPStatus.PARTIAL_CONTENT, content[first : last + 1]
        self._answer(status, content, headers=headers, fault=fault)

    def _answer(
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
