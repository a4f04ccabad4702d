"""What is wrong with one request, collected until all of it is known."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift_service.errors import Reason, Violation, from_violations


@dataclass(slots=True)
class Faults:
    """Faults in the order of discovery."""

    violations: list[Violation] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, description: str, reason: Reason = Reason.INVALID_VALUE) -> None:
        """One more; `path` is a proto field path."""
        self.violations.append(Violation(path, description, reason))

    def raise_any(self) -> None:
        """Raises the one ServiceError for all of them, if there are any."""
        if self.violations:
            raise from_violations(self.violations, metadata=self.metadata)
