"""Between the engine's updates and a client that may go at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse

from engine_min.server.engine_thread import Stream, Update
from engine_min.server.metrics import Metrics


class CountResponses:
    """Counts answers by path and status; paths that are not routes count as one."""

    def __init__(self, app, metrics: Metrics, paths: set[str]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope, receive, send) -> None:
        async def counting(message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.responded(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)


class EventStream(StreamingResponse):
    """Whatever ends the response, be it before its first chunk, `on_end` is called."""

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None], headers: dict):
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._on_end = on_end

    async def __call__(self, scope, receive, send) -> None:
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def merged(streams: list[Stream], choices: int) -> AsyncIterator[tuple[int, Update]]:
    """The updates of all streams as they come, with the choice's number through all prompts, until all have ended."""
    waiting = {asyncio.ensure_future(stream.next()): (i, stream) for i, stream in enumerate(streams)}
    try:
        left = dict.fromkeys(range(len(streams)), choices)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i, stream = waiting.pop(task)
                for update in task.result():
                    left[i] -= update.finish_reason is not None
                    yield i * choices + update.index, update
                if left[i]:
                    waiting[asyncio.ensure_future(stream.next())] = (i, stream)
    finally:
        for task in waiting:
            task.cancel()


async def unless_gone(request: Request, work: Awaitable) -> bool:
    """Awaits the work; gives it up, and says False, when the client goes first."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
