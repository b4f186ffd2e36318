"""What `masw-perf` measures: one file per command, and what they share."""
