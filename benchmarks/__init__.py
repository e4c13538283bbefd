"""Benchmarks: ``python -m benchmarks NAME``."""

import os

# read when torch loads; profilers say on stderr when they start and stop, and that memory is older than they are
os.environ.setdefault("KINETO_LOG_LEVEL", "5")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
