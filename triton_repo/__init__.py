"""The Triton models that serve draft and target together."""
