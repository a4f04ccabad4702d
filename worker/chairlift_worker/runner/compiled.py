"""A forward pass through a transformers module that torch.compile has made code of.

Each path is compiled at its first step, which the worker takes before it serves. Afterwards nothing is compiled any
more, for that may take minutes: a batch that the code does not fit runs uncompiled. So does every batch once compiling,
or compiled code, has failed.

Code is made for at least two tokens and two sampling rows, since torch makes other code for one; what is missing is
filled with tokens that belong to nobody (attention/operator.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog
import torch
import torch._dynamo.config as dynamo
import torch._inductor.config as inductor
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.nn.functional import pad
from transformers.modeling_utils import PreTrainedModel

from chairlift_worker.attention.base import AttentionBackend, RowForm
from chairlift_worker.attention.cache import PagedCache
from chairlift_worker.attention.interface import STEP_KEYWORD, AttentionSwitch
from chairlift_worker.attention.operator import OperatorStep, serving
from chairlift_worker.compile_choice import CompileOptions
from chairlift_worker.memory_errors import is_out_of_memory
from chairlift_worker.model.cache_folder import cache_folder
from chairlift_worker.runner.batch import StepBatch
from chairlift_worker.runner.forward import ModuleForward
from chairlift_worker.runner.padding import Padding

_FOLDER: Final = "TORCHINDUCTOR_CACHE_DIR"
_MIN_SIZE: Final = 2  # torch makes other code for sizes of 0 and 1
# (tokens, sampling rows) with which code of all sizes is tried: all differ, so that torch takes none for another.
_PROBES: Final = ((6, 3), (11, 4))
_MAX_CODES: Final = 1024  # that torch keeps of one function

_log = structlog.get_logger(__name__)


class CompiledPath:
    """One function of token ids, positions and sampled places, compiled for the batches of one path."""

    def __init__(
        self, *, name: str, function: Callable[..., torch.Tensor], options: CompileOptions, device: torch.device
    ) -> None:
        """`device` is where its arguments are."""
        self._name = name
        self._device = device
        self._function = function
        self._options = options
        self._code: Callable[..., torch.Tensor] | None = None
        self.has_failed = False

    @property
    def is_static(self) -> bool:
        """Whether there is code for certain sizes only."""
        return self._options.dynamic is False

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to compile."""
        return self._code is not None or self.has_failed

    def compile(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Makes code for these numbers of tokens and sampling rows; minutes. A failure is logged, and remembered."""
        num_codes = len(shapes) if self.is_static else 1
        takes = "up to some minutes for each, less if the cache folder has it"
        _log.info("compiling", path=self._name, codes=num_codes, takes=takes)
        began = time.monotonic()
        try:
            self._code = self._compile(shapes, began)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a compiler, the model itself is fine
            self.give_up(error)
            return
        _log.info("compiled", path=self._name, seconds=round(time.monotonic() - began, 1))

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """What the function gives. Raises what the code raises."""
        assert self._code is not None
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._code(*inputs)

    def give_up(self, error: Exception) -> None:
        """From now on there is no code."""
        self.has_failed = True
        self._code = None
        cause = " ".join(str(error).split())[:300]
        _log.warning(
            "torch.compile failed: steps run uncompiled", path=self._name, cause=f"{type(error).__name__}: {cause}"
        )

    def _compile(self, shapes: Sequence[tuple[int, int]], began: float) -> Callable[..., torch.Tensor]:
        options = self._options
        code: Callable[..., torch.Tensor] = torch.compile(
            self._function,
            fullgraph=options.fullgraph,
            dynamic=options.dynamic,
            backend=options.backend,
            mode=options.mode,
            options=options.options,
        )
        for number, (num_tokens, num_sampled) in enumerate(shapes):
            if self.is_static and number:
                seconds = round(time.monotonic() - began, 1)
                _log.info("still compiling", path=self._name, codes=len(shapes), done=number, seconds=seconds)
            places = torch.arange(num_tokens, device=self._device)[None]
            with serving(None, 0):
                code(torch.zeros_like(places), places, places[0, :1].expand(num_sampled).contiguous())
        return code


class CompiledForward:
    """A transformers module, compiled on one path or on both, its attention on pages."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        backend: AttentionBackend[Any],
        cache: PagedCache,
        varlen: CompileOptions | None,
        decode: CompileOptions | None,
        padding: Padding,
        captured: bool,
    ) -> None:
        """None: that path is not compiled. `padding` has the sizes for which there is code where it is not for all.

        `captured`: batches of the varlen path come padded for graphs.
        """
        _prepare_torch()
        self.form: RowForm = backend.form
        self._backend = backend
        self._cache = cache
        self._padding = padding
        self._captured = captured
        self._plain = ModuleForward(model=model, backend=backend, cache=cache)
        self._switch = AttentionSwitch(model)
        function, device = _function_of(model), cache.sectors.device

        def path(name: str, options: CompileOptions | None) -> CompiledPath | None:
            if options is None:
                return None
            return CompiledPath(name=name, function=function, options=options, device=device)

        self._varlen, self._decode = path("varlen", varlen), path("decode", decode)
        if decode == varlen and self._varlen is not None and not self._varlen.is_static:
            self._decode = self._varlen  # the same code does: it does not know what the rows are

    def __call__(self, batch: StepBatch) -> torch.Tensor:
        """(sampling rows, vocabulary) float32 logits, in the batch's order. Raises whatever the model raises."""
        path = self._decode if batch.in_place else self._varlen
        if path is None:
            return self._plain(batch)
        if not path.is_ready:
            with self._switch:
                path.compile(self._shapes(path, in_place=batch.in_place))
        if path.has_failed:
            return self._plain(batch)
        try:
            return self._run(path, batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # no fault of the code either: it runs again when there is some
            logits = self._plain(batch)  # raises what is not the code's fault; else writes what that may have written
            path.give_up(error)
            return logits

    def _run(self, path: CompiledPath, batch: StepBatch) -> torch.Tensor:
        num_tokens, num_sampled = batch.input_ids.shape[1], batch.sampled.shape[0]
        more_tokens = self._size(path, num_tokens, in_place=batch.in_place) - num_tokens
        more_sampled = self._size(path, num_sampled, in_place=batch.in_place) - num_sampled
        step = self._backend.step(self._cache, batch.metadata)
        with self._switch, serving(step, num_tokens):
            logits = path.run(
                pad(batch.input_ids, (0, more_tokens)),
                pad(batch.position_ids, (0, more_tokens)),
                pad(batch.sampled, (0, more_sampled)),
            )
        return logits[:num_sampled]

    def _size(self, path: CompiledPath, number: int, *, in_place: bool) -> int:
        return max(self._padding.rounded(number, in_place=in_place) if path.is_static else number, _MIN_SIZE)

    def _shapes(self, path: CompiledPath, *, in_place: bool) -> Sequence[tuple[int, int]]:
        """Numbers of tokens and of sampling rows. Batches in which more rows sample than usual run uncompiled."""
        if not path.is_static:
            return _PROBES
        if in_place:
            return sorted({(max(size, _MIN_SIZE),) * 2 for size in self._padding.decode_sizes()})
        usual = self._padding.q_interval
        return [
            (max(size, _MIN_SIZE), max(usual, _MIN_SIZE))
            for size in self._padding.varlen_sizes(captured=self._captured)
        ]


def _function_of(model: PreTrainedModel) -> Callable[..., torch.Tensor]:
    """What is compiled: (1, tokens) ids and positions, (places,) to (places, vocabulary) float32 logits."""
    step = OperatorStep()

    def logits_of(input_ids: torch.Tensor, position_ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        output = model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=sampled,
            **{STEP_KEYWORD: step},
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits

    return logits_of


def _prepare_torch() -> None:
    """Keeps compiled code between starts, and starts no processes for compiling: they would outlive a killed worker."""
    if os.environ.get(_FOLDER, default_cache_dir()) == default_cache_dir():  # torch puts its default there itself
        os.environ[_FOLDER] = str(cache_folder() / "inductor")
    inductor.compile_threads = 1
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MAX_CODES
