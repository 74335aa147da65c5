"""What passes share: making nodes, merging and splitting collectives, arranging a graph."""
