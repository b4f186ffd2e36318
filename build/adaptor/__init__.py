"""Training and evaluation of the memory adaptor (MASW, arXiv 2608.30252, sections 4 and 5)."""
