"""Floor 5, faces: what people see. Nothing imports them."""
