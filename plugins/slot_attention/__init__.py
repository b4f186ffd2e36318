"""Slot attention: the visibility rule, the plain oracle, and the operator the engines call."""
