"""Settings of service and worker, merged once from all their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from chairlift_worker.ipc.messages import SettingMsg
from chairlift_worker.ipc.settings import WorkerSettings
from msgspec import NODEFAULT

from chairlift_service.addresses import Address, parse_address
from chairlift_service.config.fields import ConfigError, Field, fields_of, one_line
from chairlift_service.config.settings import ServiceSettings
from chairlift_service.config.sources import ENV_PREFIX, Source, listed, parse_environment, parse_file, parse_flags
from chairlift_service.gateway import is_installed

DEFAULT: Final = "default"
_SERVICE_FIELDS: Final = tuple(fields_of(ServiceSettings))
_WORKER_FIELDS: Final = tuple(fields_of(WorkerSettings))
_FIELDS: Final = (*_WORKER_FIELDS, *_SERVICE_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What was asked of both processes, checked."""

    service: ServiceSettings
    worker: WorkerSettings  # what is None there, the worker resolves
    listen: tuple[Address, ...]
    admin_listen: Address | None
    metrics_listen: Address | None
    origins: Mapping[str, str]  # setting: flag, variable, file or `default`
    warnings: tuple[str, ...]  # to be logged once logging works
    print_config: bool  # print `described(...)` and exit

    def described(self) -> tuple[SettingMsg, ...]:
        """Every setting with its value and where it is from: the model first, then worker and service."""
        settings = ((self.worker, _WORKER_FIELDS), (self.service, _SERVICE_FIELDS))
        return tuple(
            SettingMsg(name=f.name, value=one_line(getattr(struct, f.name)), reason=self.origins[f.name])
            for struct, fields in settings
            for f in fields
        )

    def __str__(self) -> str:
        """What `--print-config` prints: `name = value  # where from`, aligned."""
        rows = self.described()
        names, values = max(len(r.name) for r in rows), max(len(r.value) for r in rows)
        return "\n".join(f"{r.name:{names}} = {r.value:{values}}  # {r.reason}" for r in rows)


def load(argv: Sequence[str], environ: Mapping[str, str]) -> Configuration:
    """Merges flags (`argv` without the program's name), environment, file and defaults, in this order of precedence.

    Raises ConfigError; SystemExit after `--help`.
    """
    command = parse_flags(argv, {"model and worker": _WORKER_FIELDS, "service": _SERVICE_FIELDS})
    names = [field.name for field in _FIELDS]
    environment = parse_environment(environ, names)
    path = command.config or environ.get(ENV_PREFIX + "CONFIG")
    file = parse_file(path, names) if path else Source({})
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for field in _FIELDS:
        values[field.name], origins[field.name] = _pick(field, flags=command.source, environment=environment, file=file)
    service = ServiceSettings(**{field.name: values[field.name] for field in _SERVICE_FIELDS})
    listen, admin_listen, metrics_listen = _addresses(service, origins)
    _check_tls(service, origins)
    _check_gateway(service, origins)
    return Configuration(
        service=service,
        worker=WorkerSettings(**{field.name: values[field.name] for field in _WORKER_FIELDS}),
        listen=listen,
        admin_listen=admin_listen,
        metrics_listen=metrics_listen,
        origins=origins,
        warnings=(*command.source.warnings, *environment.warnings, *file.warnings),
        print_config=command.print_config,
    )


def _pick(field: Field, *, flags: Source, environment: Source, file: Source) -> tuple[Any, str]:
    """(value, origin) of one setting. Every source's value is checked, also where another one wins."""
    found = []
    for source, text in ((flags, True), (environment, True), (file, False)):
        if given := source.given.get(field.name):
            value = given.value
            if source is environment and field.is_list:
                value = listed(value)
            found.append((field.parse(value, origin=given.origin, text=text), given.origin))
    if found:
        return found[0]
    if field.default is NODEFAULT:
        variable = ENV_PREFIX + field.name.upper()
        raise ConfigError(f"{field.name} is not set: give {field.flag}, {variable} or a key of the --config file")
    return field.default, DEFAULT


def _addresses(
    service: ServiceSettings, origins: Mapping[str, str]
) -> tuple[tuple[Address, ...], Address | None, Address | None]:
    """The addresses parsed; refuses those that others can reach unless that was asked for, and doubles."""
    seen: set[str] = set()

    def parse(name: str, text: str) -> Address:
        where = f"{name} = {one_line(text)} (from {origins[name]})"
        try:
            address = parse_address(text)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if not address.is_local and not (service.insecure or service.tls_cert):
            raise ConfigError(
                f"{where}: other machines can reach this address: encrypt it by --tls-cert and --tls-key, "
                "use a loopback address or unix:PATH, or allow it by --insecure"
            )
        if str(address) in seen and not str(address).endswith(":0"):
            raise ConfigError(f"{where}: the address is given twice")
        seen.add(str(address))
        return address

    listen = tuple(parse("listen", text) for text in service.listen)
    admin = None if service.admin_listen is None else parse("admin_listen", service.admin_listen)
    metrics = None if service.metrics_listen is None else parse("metrics_listen", service.metrics_listen)
    return listen, admin, metrics


def _check_tls(service: ServiceSettings, origins: Mapping[str, str]) -> None:
    """Refuses settings of TLS that say too little, or contradict each other."""
    for name, needed in (("tls_cert", "tls_key"), ("tls_key", "tls_cert"), ("tls_client_ca", "tls_cert")):
        value = getattr(service, name)
        if value is not None and getattr(service, needed) is None:
            raise ConfigError(f"{name} = {one_line(value)} (from {origins[name]}): {needed} must be set too")
    if service.insecure and service.tls_cert is not None:
        raise ConfigError(f"insecure = true (from {origins['insecure']}): tls_cert says the opposite; give one of them")


def check_model(configuration: Configuration) -> None:
    """What is clearly a path must be there; the worker, which knows more, takes seconds to say so."""
    model = configuration.worker.model
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().exists():
        raise ConfigError(f"model = {one_line(model)} (from {configuration.origins['model']}): no such folder or file")


def _check_gateway(service: ServiceSettings, origins: Mapping[str, str]) -> None:
    if service.gateway == "on" and not is_installed():
        where = f"gateway = on (from {origins['gateway']})"
        raise ConfigError(f"{where}: needs the packages of the extra chairlift[gateway]")
