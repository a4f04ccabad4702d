"""The composition root of the service: every object, made once, in the order of dependence."""

from __future__ import annotations

import dataclasses
import os

from chairlift_service.config import Configuration
from chairlift_service.gateway import GatewayServicer, answers_gateways, make_servicer
from chairlift_service.health import Health
from chairlift_service.lifecycle import Lifecycle
from chairlift_service.metrics.collector import Metered, ServiceCollector
from chairlift_service.operations import Operations
from chairlift_service.requests.admission import Admission
from chairlift_service.requests.brake import Brake
from chairlift_service.requests.canceller import Canceller
from chairlift_service.requests.dispatch import Dispatcher
from chairlift_service.requests.intake import Intake
from chairlift_service.requests.kept import KeptResults
from chairlift_service.requests.readers import Readers
from chairlift_service.requests.recorder import RequestRecorder
from chairlift_service.requests.registry import Registry
from chairlift_service.requests.request_tracer import RequestTracer
from chairlift_service.servers import ADMIN_SERVICES, MainServicers, main_services
from chairlift_service.servicers.admin import AdminServicer
from chairlift_service.servicers.call_counts import CallCounts
from chairlift_service.servicers.generation import GenerationServicer
from chairlift_service.servicers.info import InfoServicer
from chairlift_service.servicers.text import TextServicer
from chairlift_service.statistics import ServerStatistics
from chairlift_service.tracing import make_tracer
from chairlift_service.workers.figures import WorkerFigures
from chairlift_service.workers.line import WorkerLine
from chairlift_service.workers.succession import Succession
from chairlift_service.workers.worker import WorkerFactory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Core:
    """The long-lived objects."""

    configuration: Configuration
    line: WorkerLine
    succession: Succession
    lifecycle: Lifecycle
    readers: Readers
    registry: Registry
    dispatcher: Dispatcher
    intake: Intake
    operations: Operations
    main_health: Health
    admin_health: Health
    statistics: ServerStatistics
    metered: Metered | None  # None: nobody asks for it
    tracer: RequestTracer | None  # the same

    @classmethod
    def create(cls, configuration: Configuration, *, factory: WorkerFactory) -> Core:
        """Makes them. Needs a running event loop; starts nothing."""
        settings = configuration.service
        main_health, admin_health = Health(services=main_services(settings.gateway)), Health(services=ADMIN_SERVICES)
        lifecycle = Lifecycle(healths=(main_health, admin_health))
        line = WorkerLine()
        figures = WorkerFigures(line=line)
        brake = Brake(port=line, buffer_tokens=settings.reader_buffer_tokens, patience_s=settings.slow_reader_timeout)
        readers = Readers(brake=brake)
        admission = Admission(max_requests=settings.max_waiting_requests, max_tokens=settings.max_waiting_tokens)
        kept = KeptResults(ttl_s=settings.result_ttl, max_bytes=settings.result_memory)
        tracer = make_tracer(settings.otlp_endpoint, os.environ)
        registry = Registry(admission=admission, kept=kept, readers=readers, tracer=tracer)
        metered = _metered(configuration)
        dispatcher = Dispatcher(
            registry=registry,
            readers=readers,
            port=line,
            recorder=None if metered is None else metered.requests,
            tracer=tracer,
        )
        return cls(
            configuration=configuration,
            line=line,
            succession=Succession(
                factory=factory,
                line=line,
                lifecycle=lifecycle,
                registry=registry,
                dispatcher=dispatcher,
                figures=figures,
                restart_limit_s=settings.worker_restart_limit,
            ),
            lifecycle=lifecycle,
            readers=readers,
            registry=registry,
            dispatcher=dispatcher,
            intake=Intake(lifecycle=lifecycle, admission=admission, registry=registry, port=line),
            operations=Operations(
                lifecycle=lifecycle,
                registry=registry,
                readers=readers,
                line=line,
                update_timeout_s=settings.start_timeout,
            ),
            main_health=main_health,
            admin_health=admin_health,
            statistics=ServerStatistics(figures=figures, registry=registry),
            metered=metered,
            tracer=tracer,
        )

    def main_servicers(self) -> MainServicers:
        """The services for callers."""
        return MainServicers(
            generation=GenerationServicer(
                intake=self.intake,
                registry=self.registry,
                readers=self.readers,
                canceller=Canceller(registry=self.registry, port=self.line),
            ),
            text=TextServicer(lifecycle=self.lifecycle, max_message_bytes=self.configuration.service.max_message_bytes),
            info=InfoServicer(
                lifecycle=self.lifecycle,
                succession=self.succession,
                statistics=self.statistics,
                asked=self.configuration.described(),
            ),
            gateway=self._gateway_servicer(),
            health=self.main_health,
        )

    def admin_servicer(self) -> AdminServicer:
        """The service for operators."""
        return AdminServicer(operations=self.operations)

    def _gateway_servicer(self) -> GatewayServicer | None:
        """The service for gateways; None where they are not answered."""
        if not answers_gateways(self.configuration.service.gateway):
            return None
        return make_servicer(
            lifecycle=self.lifecycle,
            health=self.main_health,
            intake=self.intake,
            registry=self.registry,
            readers=self.readers,
            canceller=Canceller(registry=self.registry, port=self.line),
            statistics=self.statistics,
        )

    def collector(self, metered: Metered) -> ServiceCollector:
        """What a scrape reads."""
        return ServiceCollector(statistics=self.statistics, lifecycle=self.lifecycle, metered=metered)


def _metered(configuration: Configuration) -> Metered | None:
    if configuration.metrics_listen is None:
        return None
    return Metered(requests=RequestRecorder(), calls=CallCounts())
