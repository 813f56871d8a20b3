"""The measurement: clocks, rows on tapes, correctness, profiles, PTX, and the lock of a GPU."""
