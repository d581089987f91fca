"""The engine's thread. Clients hand in requests and read updates; nothing that they do or leave undone holds it up."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from dataclasses import dataclass, field

from engine_min.engine import LLM
from engine_min.request import RequestOutput, SamplingParams
from engine_min.server.metrics import Metrics


class EngineError(RuntimeError):
    """The engine failed on a request that was sound."""


class QueueFullError(RuntimeError):
    """More requests wait than are allowed to."""


@dataclass(frozen=True)
class Update:
    """What one choice has gained since the update before."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None


@dataclass
class _Sent:
    """How much of one choice has been passed on."""

    text: int = 0
    tokens: int = 0
    finished: bool = False


@dataclass(eq=False)
class Stream:
    """One request on its way: its updates are put into a queue that only the event loop touches."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    output: RequestOutput | None = None
    arrived: float = field(default_factory=time.monotonic)
    last_token: float | None = None
    _updates: asyncio.Queue = field(default_factory=asyncio.Queue)
    _sent: dict[int, _Sent] = field(default_factory=dict)

    async def next(self) -> list[Update]:
        """The updates of one step; EngineError if the request was lost."""
        item = await self._updates.get()
        if isinstance(item, Exception):
            raise item
        return item

    def put(self, item: list[Update] | Exception) -> None:
        self._updates.put_nowait(item)

    def collect(self) -> list[Update]:
        """What is new; called in the engine's thread, where the outputs do not change meanwhile."""
        updates = []
        for index, choice in enumerate(self.output.outputs):
            sent = self._sent.setdefault(index, _Sent())
            if sent.finished or (len(choice.token_ids) == sent.tokens and choice.finish_reason is None):
                continue
            logprobs = None if choice.logprobs is None else choice.logprobs[sent.tokens :]
            updates.append(
                Update(index, choice.text[sent.text :], choice.token_ids[sent.tokens :], logprobs, choice.finish_reason)
            )
            self._sent[index] = _Sent(len(choice.text), len(choice.token_ids), choice.finish_reason is not None)
        return updates


Job = tuple[str, list[int], SamplingParams]


class EngineThread:
    def __init__(self, llm: LLM, metrics: Metrics, max_waiting: int):
        self.llm = llm
        self.failure: Exception | None = None  # once set, the engine is lost and takes no more requests
        self._metrics = metrics
        self._max_waiting = max_waiting
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- For the event loop.

    def start(self) -> None:
        self._thread.start()

    async def submit(self, jobs: list[Job]) -> list[Stream]:
        """Queues the jobs, all of them or, with an exception, none."""
        loop = asyncio.get_running_loop()
        streams = [Stream(request_id, loop) for request_id, _, _ in jobs]
        done = loop.create_future()
        self._commands.put(lambda: self._add(jobs, streams, done))
        try:
            await done
        except asyncio.CancelledError:
            self.abort(streams)
            raise
        return streams

    def abort(self, streams: list[Stream]) -> None:
        """Ends the requests that have not ended yet."""
        self._commands.put(lambda: self._abort(streams))

    def close(self) -> None:
        """Ends the thread; requests still running are aborted."""
        self._commands.put(self._close)
        self._thread.join()

    # ---- In the thread.

    def _run(self) -> None:
        while not self._closing:
            try:
                self._take_commands(wait=self.failure is not None or not self.llm.has_unfinished())
                if self.failure is None:
                    if self.llm.has_unfinished():
                        self._step()
                    else:
                        self._metrics.observe_engine(self.llm.stats())
            except Exception as caught:
                self._fail(EngineError(f"the engine failed: {caught!r}"))

    def _take_commands(self, wait: bool) -> None:
        try:
            while True:
                self._commands.get(block=wait)()
                wait = False
        except queue.Empty:
            pass

    def _add(self, jobs: list[Job], streams: list[Stream], done: asyncio.Future) -> None:
        error = None
        for (request_id, token_ids, params), stream in zip(jobs, streams, strict=True):
            try:
                if self.failure is not None:
                    raise EngineError(str(self.failure))
                if len(self._streams) >= self._max_waiting + self.llm.config.max_num_seqs:
                    raise QueueFullError(f"{self._max_waiting} requests are waiting already")
                stream.output = self.llm.add_request(request_id, token_ids, params)
                self._streams[request_id] = stream
            except Exception as caught:
                error = caught
                self._abort(streams)
                break
        loop = streams[0].loop
        self._call(loop, _resolve, done, error)

    def _abort(self, streams: list[Stream]) -> None:
        for stream in streams:
            if self._streams.pop(stream.request_id, None) is not None and self.failure is None:
                self.llm.abort(stream.request_id)
                self._metrics.finished("abort")

    def _close(self) -> None:
        self._abort(list(self._streams.values()))
        self._closing = True

    def _step(self) -> None:
        try:
            self.llm.step()
            error = None
        except Exception as caught:
            error = EngineError(f"the engine failed on this request: {caught}")
        self._metrics.observe_engine(self.llm.stats())  # before anybody hears of the step
        before = len(self._streams)
        for loop, deliveries in self._deliveries(error).items():
            self._call(loop, _deliver, deliveries)
        if error is not None and len(self._streams) == before:  # nobody was to blame: the next step would fail, too
            self._fail(error)

    def _deliveries(self, error: Exception | None) -> dict[asyncio.AbstractEventLoop, list]:
        """One call per loop and step wakes the loop once, however many requests have something new."""
        deliveries: dict[asyncio.AbstractEventLoop, list] = {}
        now = time.monotonic()
        for stream in list(self._streams.values()):
            updates = stream.collect()
            if not updates:
                continue
            lost = any(update.finish_reason == "abort" for update in updates)
            deliveries.setdefault(stream.loop, []).append((stream, (error or _lost()) if lost else updates))
            self._metrics.observe_updates(stream, updates, now)
            if lost or stream.output.finished:
                del self._streams[stream.request_id]
        return deliveries

    def _fail(self, error: Exception) -> None:
        self.failure = error
        for stream in self._streams.values():
            self._call(stream.loop, stream.put, error)
        self._streams.clear()

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function, *args) -> None:
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody is left to hear of it
            pass


def _lost() -> EngineError:
    return EngineError("the request was aborted")


def _deliver(deliveries: list) -> None:
    for stream, item in deliveries:
        stream.put(item)


def _resolve(done: asyncio.Future, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
