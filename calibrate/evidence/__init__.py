"""Evidence: scores of items under rules, gains with their errors, verdicts and limits on harm."""
