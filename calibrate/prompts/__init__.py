"""Prompts as examples of a model: of a file, of the built-in task, of text, as token ids."""
