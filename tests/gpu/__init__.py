"""Tests that need a CUDA device: `pytest -m gpu`, or `python launch/gpu_check.py`."""
