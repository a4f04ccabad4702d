"""`python -m chairlift_client.cli`, the same as `chairlift`."""

import sys

from chairlift_client.cli import main

sys.exit(main())
