"""How the finished kernels stand to others that do the same: `python -m benchmarks --help`.

A file for each operation has its contenders and the ranges that sizes are drawn from; what they compute says
labkit.work. run.py has the loop, peers.py calls other packages, page.py makes docs/benchmark.md from what was
recorded.
"""
