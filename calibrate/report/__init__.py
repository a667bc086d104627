"""Results for people: sentences, labels, tables, figures and pages; and the same as JSON."""
