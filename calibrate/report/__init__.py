"""What results look like: tables, figures and pages."""
