"""Lessons executed, recorded, and spread over several GPUs or a cluster."""
