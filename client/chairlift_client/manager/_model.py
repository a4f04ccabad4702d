"""A served model, in the place of one that is loaded: the entry points of transformers' continuous batching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Unpack

from chairlift.v1 import text_service_pb2

from chairlift_client._access import Access, Connection
from chairlift_client._chat import Chat
from chairlift_client._progress import Progress
from chairlift_client._stubs import Stubs
from chairlift_client._sync_connection import call
from chairlift_client.manager._batch import run_batch
from chairlift_client.manager._generation_config import GenerationConfig
from chairlift_client.manager._manager import ContinuousBatchingManager
from chairlift_client.manager._output import GenerationOutput

_RECONNECT_TIMEOUT: Final = 60.0
_RENDER_TIMEOUT: Final = 30.0


class RemoteModel:
    """A model that a Chairlift service serves. Made by `connect`.

    `generation_config`, a GenerationConfig of ours or of transformers, holds for every manager that is given none.
    """

    def __init__(
        self,
        target: str | None,
        *,
        generation_config: object | None = None,
        reconnect_timeout: float = _RECONNECT_TIMEOUT,
        **access: Unpack[Access],
    ) -> None:
        self._connection = Connection.resolve(target, access)
        self.target = self._connection.target
        self.generation_config = generation_config if generation_config is not None else GenerationConfig()
        self._reconnect_timeout = reconnect_timeout
        self._cached_manager: ContinuousBatchingManager | None = None

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_arguments: object,
    ) -> list[int]:
        """The prompt of a conversation, as a tokenizer's method of this name makes it with the model's own template.

        `chat_template` names one of the model's templates. Text of control tokens inside the conversation is encoded
        as ordinary text. Raises ChairliftError where the template refuses, or the model has none.

        >>> bytes(connect(target).apply_chat_template([{"role": "user", "content": "Hi"}])).split()
        [b'user:', b'Hi']
        """
        chat = Chat(
            conversation,
            tools=tools or (),
            documents=documents or (),
            template=chat_template,
            template_arguments=template_arguments,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        request = text_service_pb2.RenderChatRequest(chat=chat.message())
        with contextlib.closing(self._connection.open()) as channel:
            stubs = Stubs(channel, metadata=self._connection.metadata)
            return list(call(stubs.text.RenderChat, request, timeout=_RENDER_TIMEOUT).token_ids)

    def init_continuous_batching(
        self, generation_config: object | None = None, continuous_batching_config: object | None = None
    ) -> ContinuousBatchingManager:
        """A manager to `start()`; the one that was kept by `persistent_manager=True`, if there is one.

        Raises ValueError if the service does not run with this `continuous_batching_config`, or cannot honour an
        entry of `generation_config`; ChairliftError if it does not answer.
        """
        if self._cached_manager is not None:
            return self._cached_manager
        return ContinuousBatchingManager(
            connection=self._connection,
            generation_config=self.generation_config if generation_config is None else generation_config,
            continuous_batching_config=continuous_batching_config,
            reconnect_timeout=self._reconnect_timeout,
        )

    @contextlib.contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: object | None = None,
        *,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: object | None = None,
        persistent_manager: bool = False,
    ) -> Iterator[ContinuousBatchingManager]:
        """A manager that is started, and on leaving stopped (`block` and `timeout` as in its `stop`) and destroyed.

        With `persistent_manager` it is kept for the next session instead.

        >>> with connect(target).continuous_batching_context_manager() as manager:
        ...     _ = manager.add_request(input_ids=[1, 2], request_id="mine", max_new_tokens=4)
        ...     for result in manager:
        ...         print(result.request_id, result.generated_tokens, result.status.name)
        mine [1, 2, 1, 2] FINISHED
        """
        manager = self.init_continuous_batching(generation_config, continuous_batching_config)
        manager.start()
        try:
            yield manager
        finally:
            if manager.is_running():
                manager.stop(block=block, timeout=timeout)
            if persistent_manager:
                self._cached_manager = manager
            else:
                manager.destroy()
                self._cached_manager = None

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Destroy the manager that `persistent_manager=True` has kept, if any."""
        if self._cached_manager is not None:
            self._cached_manager.destroy()
            self._cached_manager = None

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: object | None = None,
        continuous_batching_config: object | None = None,
        *,
        max_new_tokens: int | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
    ) -> dict[str, GenerationOutput]:
        """Generate for a list of tokenised prompts; blocks, and returns all results by request id, in order.

        A request that failed on the way is among them with its `error`. Raises ChairliftError if the service refuses
        the batch (an invalid prompt, say) or is gone.

        >>> model = connect(target)
        >>> outputs = model.generate_batch(inputs=[[5, 6], [7]], generation_config=GenerationConfig(max_new_tokens=3))
        >>> [output.generated_tokens for output in outputs.values()]
        [[5, 6, 5], [7, 7, 7]]
        """
        inputs = list(inputs)
        if not inputs:
            return {}
        session = self.continuous_batching_context_manager(
            generation_config,
            continuous_batching_config=continuous_batching_config,
            persistent_manager=persistent_manager,
        )
        with session as manager, Progress(total=len(inputs), stream=sys.stderr if progress_bar else None) as progress:
            return run_batch(
                manager,
                inputs,
                max_new_tokens=max_new_tokens,
                record_timestamps=record_timestamps,
                on_result=progress.advance,
            )


def connect(
    target: str | None = None, *, generation_config: object | None = None, **access: Unpack[Access]
) -> RemoteModel:
    """The model served at `target` (`HOST:PORT`, `unix:PATH`; else CHAIRLIFT_TARGET, else 127.0.0.1:50051).

    Stands where `AutoModelForCausalLM.from_pretrained(...)` stood; nothing is loaded, and nothing called yet. `tls`,
    `token` and `token_in_clear`: see `Access`.
    """
    return RemoteModel(target, generation_config=generation_config, **access)
