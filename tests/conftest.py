"""Triton reads TRITON_INTERPRET when a kernel is declared, so it must be set before anything imports one."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # the suite runs in several processes
settings.register_profile("sopdist", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sopdist")
