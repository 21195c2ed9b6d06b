"""How hypothesis runs here: the same examples each time; with VELDT_EXAMPLES=n, n times as many and new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("same", derandomize=True, database=None, print_blob=True, suppress_health_check=SLOW)
settings.register_profile("new", print_blob=True, suppress_health_check=SLOW)
settings.load_profile("new" if "VELDT_EXAMPLES" in os.environ else "same")
