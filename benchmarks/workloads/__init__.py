"""What the benchmarked layers compute, as plain PyTorch, and other libraries' calls for them."""
