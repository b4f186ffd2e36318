"""Shipped pairs of draft and target."""
