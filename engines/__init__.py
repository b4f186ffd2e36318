"""What runs: slot memory, decoder, draft, target and the speculative loop."""
