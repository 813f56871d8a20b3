"""``python -m labkit``."""

from labkit.cli import main

main()
