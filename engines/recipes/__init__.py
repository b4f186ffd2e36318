"""Shipped pairs of draft and target."""

EMBEDDED = "embedded"  # the recipe of the pair that any machine can have
