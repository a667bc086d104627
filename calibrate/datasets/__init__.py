"""Data sets on disk: rows of logits and examples of a model, manifests, shards, resumption."""
