"""Floor 1, files: what is on disk and how it is read and written."""
