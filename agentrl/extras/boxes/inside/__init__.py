"""Programs that run inside of a box, as source text: they import the standard library alone."""
