"""Messages in a narrower type, where that makes the planned step shorter: it changes results, and says by how much."""
