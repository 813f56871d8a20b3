"""The measurement: clocks, rows on tapes, correctness, a copy beside it, and the lock of a GPU."""
