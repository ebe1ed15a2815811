"""Settings of all tests: hypothesis profiles (`HYPOTHESIS_PROFILE=soak pytest -m soak` runs the long ones), and
Triton's interpreter where there is no GPU: it must be told before anything imports Triton, as transformers does in
parts."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, suppress_health_check=slow)
settings.register_profile("soak", max_examples=2000, deadline=None, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
