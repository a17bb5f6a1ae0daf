"""Settings of the test run."""

from __future__ import annotations

import os

from hypothesis import settings

# Where a run decides about a change it tries the same examples each time; elsewhere it looks for new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
