"""Plans as files: every plan can be written, read by people, edited and pinned."""
