"""`chairlift-serve` with the fake worker in place of the real one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from chairlift_service.__main__ import main

from support.fake_worker import COMMAND

COMMAND_LINE = (sys.executable, str(Path(__file__)))
"""What takes the place of `chairlift-serve`."""

if __name__ == "__main__":
    sys.exit(main(worker_command=COMMAND))
