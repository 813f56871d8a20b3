"""Helpers of the course: measure, check, inspect and draw GPU kernels."""

__version__ = "0.1.0"
