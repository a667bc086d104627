"""Floor 4, pipeline: what is done with a head, from collecting rows to a published fit."""
