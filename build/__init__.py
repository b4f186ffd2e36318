"""What prepares, serves and measures: checkpoints, Triton repository, supervisor, benchmarks."""
