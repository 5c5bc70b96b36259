"""Finding out: the placement of each tensor, and what is to be converted. Nothing here changes a graph."""
