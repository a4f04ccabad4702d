"""How forward passes through a transformers module are run: compiled or not, captured as graphs or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from chairlift_worker.compile_choice import CompileOptions, choose_compile
from chairlift_worker.graph_choice import GraphOptions, choose_graphs
from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.setting_log import SettingError, SettingLog


@dataclass(frozen=True, slots=True, kw_only=True)
class PassConfig:
    """For each of the two paths: any batch (varlen), and one-token rows on the decode fast path."""

    varlen_compile: CompileOptions | None = None  # None: not compiled
    decode_compile: CompileOptions | None = None
    graphs: GraphOptions = field(default_factory=GraphOptions)

    @property
    def are_plain(self) -> bool:
        """Whether passes are neither compiled nor captured."""
        return self.varlen_compile is None and self.decode_compile is None and not self.graphs.are_on


def resolve_passes(settings: WorkerSettings, log: SettingLog, *, backend: str, has_fast_path: bool) -> PassConfig:
    """What holds for a backend, noted with its reasons. Raises SettingError where what was asked cannot be."""
    log.note("default_compile_level", settings.default_compile_level, "as set, or the default")
    try:
        return PassConfig(
            varlen_compile=_compile(settings, log, "varlen", backend, has_fast_path),
            decode_compile=_compile(settings, log, "decode", backend, has_fast_path),
            graphs=_graphs(settings, log, backend, has_fast_path),
        )
    except ValueError as error:
        raise SettingError(str(error)) from error


def _compile(
    settings: WorkerSettings,
    log: SettingLog,
    path: Literal["varlen", "decode"],
    backend: str,
    has_fast_path: bool,  # noqa: FBT001 - a fact, not a switch
) -> CompileOptions | None:
    chosen = choose_compile(
        settings.varlen_compile_config if path == "varlen" else settings.decode_compile_config,
        level=settings.default_compile_level,
        path=path,
        backend=backend,
        has_fast_path=has_fast_path,
    )
    return log.choice(f"{path}_compile_config", chosen)


def _graphs(settings: WorkerSettings, log: SettingLog, backend: str, has_fast_path: bool) -> GraphOptions:  # noqa: FBT001
    intervals = (settings.q_padding_interval_size, settings.kv_padding_interval_size)
    chosen = choose_graphs(settings.use_cuda_graph, intervals=intervals, backend=backend, has_fast_path=has_fast_path)
    graphs = log.choice("use_cuda_graph", chosen, shown=chosen.value.pair)
    default = "default, for graphs and for code of fixed shapes"
    log.note("q_padding_interval_size", graphs.q_interval, "as set" if intervals[0] else default)
    log.note("kv_padding_interval_size", graphs.kv_interval, "as set" if intervals[1] else default)
    return graphs
