"""Examples of a whole model: made, scored and kept; what each head's beta does to its answers."""
