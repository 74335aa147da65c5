"""What values of settings mean: one file per kind of value, each with its parser and what it allows."""
