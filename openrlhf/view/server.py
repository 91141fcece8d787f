"""Serve the page on loopback: its files, and the answers to its requests as JSON.

Only GET, only this machine, and only under a name of this machine: the Host header is checked, so that a website cannot
reach the server by pointing its own name to 127.0.0.1. A request selects runs and samples by number, never by path.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from openrlhf.errors import ConfigError
from openrlhf.view.metrics import Position, read_metrics
from openrlhf.view.page import STATIC, TYPES, served_files, served_page
from openrlhf.view.sample_index import Query
from openrlhf.view.viewer import Viewer, to_json

HOST = "127.0.0.1"
NAMES = [HOST, "localhost"]
UPDATE_SECONDS = 1.0  # time between searches for new samples
SEARCH_SECONDS = 15.0  # time between searches for new runs, which walk through the folders
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def build_app(viewer: Viewer) -> FastAPI:
    """Return the application of a viewer."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=NAMES, www_redirect=False)
    page, files = served_page(), served_files()

    @app.middleware("http")
    async def add_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers.update(HEADERS | {"Content-Security-Policy": page.policy})
        return response

    @app.get("/")
    def index() -> Response:
        return Response(page.html, media_type="text/html")

    @app.get("/static/{name:path}")
    def static(name: str) -> Response:
        if name not in files:
            raise KeyError(name)
        return Response((STATIC / name).read_bytes(), media_type=TYPES[Path(name).suffix])

    _add_answers(app, viewer)
    return app


def _add_answers(app: FastAPI, viewer: Viewer) -> None:
    """Add the routes that the page requests; functions without `async` run in threads, because reading may be slow."""

    @app.exception_handler(KeyError)
    @app.exception_handler(OverflowError)  # a number that SQLite cannot hold
    async def unknown(request: Request, error: Exception) -> Response:
        return Response(to_json({"error": "not found"}), status_code=404, media_type="application/json")

    @app.get("/api/runs")
    def runs() -> Response:
        return _answer(viewer.runs())

    @app.get("/api/flags")
    def flags(run: int) -> Response:
        return _answer(viewer.run(run).config().flags)

    @app.get("/api/metrics")
    def metrics(run: int, since: Annotated[Position, Depends()]) -> Response:
        return _answer(read_metrics(viewer.run(run).metrics, since))

    @app.get("/api/samples")
    def samples(query: Annotated[Query, Depends()]) -> Response:
        return _answer(viewer.index.find(query))

    @app.get("/api/group")
    def group(sample: int) -> Response:
        return _answer(viewer.group(sample))


def _answer(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")


class Server(uvicorn.Server):
    """The page's server; while it runs, it also keeps the index of samples current."""

    def __init__(self, viewer: Viewer) -> None:
        super().__init__(
            uvicorn.Config(
                build_app(viewer),
                http="h11",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.viewer = viewer

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal or `should_exit`."""
        updating = threading.Thread(target=self._keep_current, daemon=True, name="openrlhf-view-index")
        updating.start()
        try:
            super().run(sockets)
        finally:
            self.viewer.index.stop()
            updating.join()

    def _keep_current(self) -> None:
        self.viewer.update()
        searched = time.monotonic()
        while not self.viewer.index.stopped.wait(UPDATE_SECONDS):
            if time.monotonic() - searched >= SEARCH_SECONDS:
                self.viewer.find_new_runs()
                searched = time.monotonic()
            self.viewer.update()


def bind(port: int | None) -> socket.socket:
    """Return a listening socket on loopback; without a port, on a free one."""
    try:
        return socket.create_server((HOST, port or 0))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"--port {port} is taken on {HOST}", try_this="no --port, for a free one") from None
        raise ConfigError(f"--port {port} cannot be bound on {HOST}: {error.strerror}") from None
