"""The family table, by kinds of attention: `table` reads a config.json with the rows of all others."""
