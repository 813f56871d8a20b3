"""How the finished kernels stand to others that do the same: `python -m benchmarks --help`.

A file for each operation has its inputs, its contenders and the ranges that sizes are drawn from; run.py has
the loop, page.py makes docs/benchmark.md from what was recorded.
"""
