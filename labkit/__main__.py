"""``python -m labkit``."""

from labkit.run.main import main

main()
