"""A package so that `tests.models` imports by name and tests/triton does not hide `triton`."""
