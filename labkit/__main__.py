"""``python -m labkit``."""

from labkit.cli.main import main

main()
