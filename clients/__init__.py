"""Clients of a running server."""
