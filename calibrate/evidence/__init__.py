"""Evidence: items scored under rules, gains and their errors, verdicts and limits; data alone."""
