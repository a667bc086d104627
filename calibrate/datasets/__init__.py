"""Data sets on disk: rows of logits and examples of a model, their manifests, shards and resumption."""
