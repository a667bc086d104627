"""Evidence: items scored under rules, gains and their errors, and what they mean in words."""
