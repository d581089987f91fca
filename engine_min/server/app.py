"""The routes: completions, chat, models, health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine_min.engine import LLM
from engine_min.server.engine_thread import EngineError, EngineThread, QueueFullError, Stream
from engine_min.server.errors import RequestError, parse_json, refusal
from engine_min.server.metrics import CONTENT_TYPE, Metrics
from engine_min.server.protocol import Job, parse
from engine_min.server.responses import Responder, event
from engine_min.server.streaming import CountResponses, EventStream, merged, unless_gone

_NO_CACHE = {"Cache-Control": "no-cache"}


class Server:
    """`draining` refuses what is new while what runs is finished."""

    def __init__(self, llm: LLM, model: str, max_waiting: int = 512, max_body_bytes: int = 4 << 20):
        self.llm = llm
        self.model = model
        self.draining = False
        self.metrics = Metrics()
        self.engine = EngineThread(llm, self.metrics, max_waiting)
        self._max_body_bytes = max_body_bytes
        self._longest = min(llm.max_model_len, llm.blocks.num_blocks * llm.blocks.block_size + 1)
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers = {
            RequestError: self._refused,
            QueueFullError: self._queue_full,
            EngineError: self._engine_failed,
            HTTPException: self._http_error,
            Exception: self._engine_failed,
        }
        counting = Middleware(CountResponses, metrics=self.metrics, paths={route.path for route in routes})
        self.app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan, middleware=[counting])

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        yield
        self.engine.close()

    # ---- Answers.

    async def _completions(self, request: Request) -> Response:
        return await self._generate(request, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, is_chat=True)

    async def _generate(self, request: Request, is_chat: bool) -> Response:
        if self.draining:
            raise RequestError("the server is shutting down", status=503)
        job = parse(parse_json(await self._read(request)), is_chat, self.model)
        try:
            prompts = await run_in_threadpool(job.token_ids, self.llm.tokenizer)
        except ValueError as error:  # the template refuses the conversation
            raise RequestError(str(error), "messages") from None
        echoes = [self._text_of(prompt) if job.echo else "" for prompt in job.prompts] or [""]
        choices = job.sampling.get("n", 1)
        echoes = [echo for echo in echoes for _ in range(choices)]
        responder = Responder(job, self.model, self.llm.tokenizer, len(echoes))
        jobs = [
            (f"{responder.request_id}-{i}", prompt, job.params(len(prompt), self._longest))
            for i, prompt in enumerate(prompts)
        ]
        try:
            streams = await self.engine.submit(jobs)
        except ValueError as error:
            raise refusal(error) from None
        if job.stream:
            events = self._events(job, responder, streams, echoes)
            return EventStream(events, on_end=lambda: self.engine.abort(streams), headers=_NO_CACHE)
        try:
            return await self._whole(request, job, responder, streams, echoes)
        finally:
            self.engine.abort(streams)

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.llm.tokenizer.decode(prompt)

    async def _whole(
        self, request: Request, job: Job, responder: Responder, streams: list[Stream], echoes: list[str]
    ) -> Response:
        updates = [[] for _ in echoes]
        per_prompt = len(echoes) // len(streams)

        async def collect() -> None:
            async for index, update in merged(streams, per_prompt):
                updates[index].append(update)

        if not await unless_gone(request, collect()):
            return Response(status_code=499)  # nobody reads it
        return JSONResponse(responder.whole(echoes, streams, updates))

    async def _events(
        self, job: Job, responder: Responder, streams: list[Stream], echoes: list[str]
    ) -> AsyncIterator[bytes]:
        try:
            for index, echo in enumerate(echoes):
                if (first := responder.first_chunk(index, echo)) is not None:
                    yield event(first)
            async for index, update in merged(streams, len(echoes) // len(streams)):
                if (chunk := responder.chunk(index, update)) is not None:
                    yield event(chunk)
            if job.include_usage:
                yield event(responder.usage_chunk(streams))
            yield event("[DONE]")
        except EngineError as error:
            yield event(RequestError(str(error), status=500).body())

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.model:
            raise RequestError(f"the model {name!r} does not exist", "model", status=404, code="model_not_found")
        return JSONResponse(self._card())

    def _card(self) -> dict:
        return {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "engine_min",
            "max_model_len": self._longest,
        }

    async def _health(self, request: Request) -> Response:
        state = "failed" if self.engine.failure else "draining" if self.draining else "ok"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    # ---- Errors.

    async def _read(self, request: Request) -> bytes:
        """The body, no more of it than is allowed."""
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self._max_body_bytes:
                    raise RequestError(f"the body is larger than {self._max_body_bytes} bytes", status=413)
        except ClientDisconnect:
            raise RequestError("the client left before it had sent its request", status=499) from None
        return bytes(body)

    def _refused(self, request: Request, error: RequestError) -> Response:
        return self._error(request, error)

    def _queue_full(self, request: Request, error: QueueFullError) -> Response:
        return self._error(request, RequestError(str(error), status=429), {"Retry-After": "1"})

    def _engine_failed(self, request: Request, error: Exception) -> Response:
        status = 503 if self.engine.failure else 500
        return self._error(request, RequestError(str(error), status=status))

    def _http_error(self, request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return self._error(request, RequestError(message, status=error.status_code), error.headers)

    def _error(self, request: Request, error: RequestError, headers: dict | None = None) -> Response:
        return JSONResponse(error.body(), status_code=error.status, headers=headers)
