"""Mathematics on arrays: entropy, optimal beta, likelihood; no files, heads or models."""
