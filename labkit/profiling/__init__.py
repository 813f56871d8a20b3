"""What was launched and compiled: profiles, launches counted without a GPU, PTX and SASS."""

from labkit.profiling import codegen, launch_counts, ledger, profiles, rungs

__all__ = ["codegen", "launch_counts", "ledger", "profiles", "rungs"]
