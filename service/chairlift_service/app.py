"""One run of the service, from binding the addresses to reaping the worker."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import signal
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import structlog

from chairlift_service.config import Configuration
from chairlift_service.core import Core
from chairlift_service.defaults import ignored_entries, request_defaults
from chairlift_service.entrance import Entrance
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.lifecycle import Happening, ServedModel
from chairlift_service.operations import LOOK_S
from chairlift_service.requests.registry import fail_all
from chairlift_service.text.chat import ChatPrompts
from chairlift_service.text.tokenizer import Tokenizer
from chairlift_service.workers.supervisor import WorkerStartError
from chairlift_service.workers.worker import COMMAND, WorkerFactory

SWEEP_PERIOD_S: Final = 1.0
"""How often results that are too old are looked for; asking for one by id looks at once."""

STATUS_GRACE_S: Final = 2.0
"""How long calls that were ended get to take their status, and what they still have to read."""

WORKER_PATIENCE_S: Final = 5.0
"""How long a worker that was asked to end may take for its last step."""

COMPILE_S: Final = 600.0
"""What a step may take longer where some are compiled: a shape that the warm-up has not seen is compiled then."""

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


class ServiceFailedError(Exception):
    """The service had to end. The text is one line."""


class Signals:
    """SIGTERM and SIGINT: the first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Catches them until the end of the block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


class End(enum.Enum):
    """How a run ended."""

    DRAINED = 0
    CUT = 1  # by a second signal


async def run(configuration: Configuration, *, worker_command: Sequence[str] = COMMAND) -> int:
    """Serves until a signal comes. Returns the exit code: 0 after a drain, 1 where a second signal cut it short.

    Raises FileError, ListenError, WorkerStartError, ServiceFailedError, each one line; all is cleaned up by then.
    `worker_command` replaces the worker's program, for tests. Must run in the main thread.
    """
    signals = Signals()
    with signals.caught():
        app = App(
            Core.create(configuration, factory=worker_factory(configuration, command=worker_command)), signals=signals
        )
        try:
            return (await app.run()).value
        finally:
            await app.close()


def worker_factory(configuration: Configuration, *, command: Sequence[str] = COMMAND) -> WorkerFactory:
    """Makes the workers that a configuration asks for."""
    service, worker = configuration.service, configuration.worker
    compiles = worker.default_compile_level > 0 or worker.varlen_compile_config or worker.decode_compile_config
    return WorkerFactory(
        settings=worker,
        start_timeout_s=service.start_timeout,
        step_timeout_s=service.step_timeout + (COMPILE_S if compiles else 0.0),
        command=command,
    )


class App:
    """Runs what `Core` made.

    ```
    bind (health: NOT_SERVING) -> start worker -> SERVING, one line on standard output -> signal
      -> NOT_SERVING, new requests refused, streams go on -> the rest UNAVAILABLE -> worker ended -> exit
    ```
    Addresses are served from before the model is loaded, so that health can be asked meanwhile; other calls get
    UNAVAILABLE, NOT_READY until then.
    """

    def __init__(self, core: Core, *, signals: Signals) -> None:
        self._core = core
        self._signals = signals
        self._entrance = Entrance(core)
        self._tokenizer: Tokenizer | None = None
        self._chat: ChatPrompts | None = None

    async def run(self) -> End:
        """Serves until the end."""
        await self._entrance.open()
        model = await self._until_first_signal(self._start())
        if model is None:
            return End.DRAINED
        self._core.lifecycle.serve(model)
        name = self._core.configuration.worker.model
        print(f"chairlift: serving {name} on {', '.join(map(str, self._entrance.addresses))}", flush=True)  # noqa: T201 - the one line
        sweeper = asyncio.create_task(self._sweep(), name="sweep of kept results")
        try:
            await self._until_first_signal(self._fail_when_lost())
            return await self._drain()
        finally:
            sweeper.cancel()

    async def close(self) -> None:
        """Ends calls, servers and worker, in this order, and takes away what they used. Safe after any failure."""
        core = self._core
        fail_all(core.registry, core.readers, ServiceError(Reason.SHUTTING_DOWN, "the service ends"))
        core.statistics.ended.set()
        for health in (core.main_health, core.admin_health):
            health.close()
        cut = self._signals.second.is_set()
        await self._entrance.stop(grace_s=0 if cut else STATUS_GRACE_S)
        await core.succession.stop(patience_s=0 if cut else WORKER_PATIENCE_S)
        self._entrance.remove_files()
        if core.tracer is not None:
            await asyncio.to_thread(core.tracer.close)
        if self._chat is not None:
            await self._chat.close()
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def _start(self) -> ServedModel:
        """Starts the worker: what is known of the model then.

        Raises WorkerStartError if it does not start, or if the service cannot use what it tells.
        """
        ready = await self._core.succession.start()
        card, settings = ready.model, self._core.configuration
        try:
            # Seconds for a large vocabulary, in which health has to be answered.
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, card.tokenizer_dir)
            self._chat = ChatPrompts.load(card.tokenizer_dir, tokenizer=self._tokenizer)
            defaults = request_defaults(
                card.generation_config,
                model_defaults=settings.service.model_defaults,
                logprobs=settings.worker.return_logprobs,
                vocab_size=card.vocab_size,
                eos_token_ids=card.eos_token_ids,
            )
        except ValueError as error:
            raise WorkerStartError(" ".join(str(error).split())) from error
        if settings.service.model_defaults and (ignored := ignored_entries(card.generation_config)):
            _log.warning("generation_config.json has entries that are not honoured", entries=ignored)
        return ServedModel(
            card=card,
            tokenizer=self._tokenizer,
            defaults=defaults,
            chat=self._chat,
            prefix_sharing=settings.worker.allow_block_sharing,
            settings=ready.settings,
        )

    async def _until_first_signal(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """What `work` returns, or raises; None if a signal comes first, with `work` cancelled and cleaned up."""
        task = asyncio.create_task(work)
        signal_task = asyncio.create_task(self._signals.first.wait())
        try:
            await asyncio.wait((task, signal_task), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, signal_task):
                each.cancel()
            await asyncio.gather(task, signal_task, return_exceptions=True)

    async def _fail_when_lost(self) -> None:
        """Waits until a lost worker cannot be replaced; then every call ends, and so does the service."""
        why = await asyncio.shield(self._core.succession.failed)
        self._core.lifecycle.enter(Happening.LOSS)
        error = ServiceError(Reason.WORKER_LOST, "the worker is gone")
        fail_all(self._core.registry, self._core.readers, error)
        raise ServiceFailedError(f"worker lost: {why}")

    async def _drain(self) -> End:
        """Refuses what is new and lets what is there end, for a time."""
        core = self._core
        core.operations.begin_end()
        timeout_s = core.configuration.service.drain_timeout
        _log.info("draining", live=core.registry.num_live, timeout_s=timeout_s)
        watch = asyncio.create_task(self._fail_when_lost(), name="loss of the worker")
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while core.operations.busy and not self._signals.second.is_set() and not watch.done():
                        await asyncio.wait((watch,), timeout=LOOK_S)
            if watch.done():
                await watch
        finally:
            watch.cancel()
        return End.CUT if self._signals.second.is_set() else End.DRAINED

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            self._core.registry.sweep()
