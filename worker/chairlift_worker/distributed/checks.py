"""What does not go with several ranks is refused by name, before weights are read."""

from __future__ import annotations

from chairlift_worker.ipc.settings import WorkerSettings
from chairlift_worker.setting_log import SettingError


def check_settings(settings: WorkerSettings) -> None:
    """Raises SettingError for a setting that does not go with several ranks."""
    if settings.tp_size == 1:
        return
    alone = {
        "model_impl": (settings.model_impl == "native", "the native decoder computes whole layers"),
        "quantization": (
            settings.quantization != "none",
            "only the native decoder has it, which computes whole layers",
        ),
        "default_compile_level": (settings.default_compile_level > 0, "compiled code does not wait for other ranks"),
        "varlen_compile_config": (settings.varlen_compile_config is not None, "the same holds as for compile levels"),
        "decode_compile_config": (settings.decode_compile_config is not None, "the same holds as for compile levels"),
        "use_cuda_graph": (bool(settings.use_cuda_graph), "graphs do not wait for other ranks"),
        "q_padding_interval_size": (settings.q_padding_interval_size > 0, "it turns graphs on"),
        "kv_padding_interval_size": (settings.kv_padding_interval_size > 0, "it turns graphs on"),
    }
    for name, (is_asked, why) in alone.items():
        if is_asked:
            value = getattr(settings, name)
            raise SettingError(f"{name} = {value}: not with tp_size = {settings.tp_size}: {why}")
