"""Floor 0, maths: arrays in, arrays out; nothing here knows of files, heads or models."""
