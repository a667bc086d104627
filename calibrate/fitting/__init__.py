"""The regression: kinds of rule fitted to rows, cross-validated, selected, and judged."""
