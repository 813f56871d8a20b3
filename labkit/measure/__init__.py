"""The measurement: clocks, sweeps, tables of results, correctness, roofline, and the lock of a GPU."""
