"""Triton reads TRITON_INTERPRET when a kernel is declared, so it must be set before anything imports one."""

import os
import signal

os.environ["TRITON_INTERPRET"] = "1"

import torch
from hypothesis import HealthCheck, settings

# A shell that starts the suite in the background lets it ignore interrupts, and so every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the suite runs in several processes
settings.register_profile("sopdist", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sopdist")
