"""`pagedkern-engine serve`: uvicorn around the app, and an orderly end."""

from __future__ import annotations

import logging
import signal
import socket

import uvicorn

from engine_min.engine import LLM
from engine_min.server.app import Server

# Longer than clients keep an idle connection (httpx 5 s, uvicorn's default too), or one may close as the other asks.
KEEP_ALIVE_SECONDS = 75


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT nothing new is taken, and what runs is finished; a second SIGINT ends it at once."""

    def __init__(self, server: Server, host: str, port: int, drain_seconds: int):
        self._server = server
        super().__init__(
            uvicorn.Config(
                server.app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=drain_seconds,
                timeout_keep_alive=KEEP_ALIVE_SECONDS, lifespan="on",
            )
        )  # fmt: skip

    def handle_exit(self, sig: int, frame) -> None:
        self._server.draining = True
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def serve(llm: LLM, model: str, host: str, port: int, drain_seconds: int, **limits) -> None:
    server = Server(llm, model, **limits)
    uvicorn_server = DrainingServer(server, host, port, drain_seconds)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        print(f"serving {model} on http://{host}:{listener.getsockname()[1]}", flush=True)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        uvicorn_server.run(sockets=[listener])
