"""A whole model: prompts and their answers, and the rules of its heads fitted through it."""
