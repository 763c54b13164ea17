"""The files of layers of multi-token prediction: `files` (names, shapes, the format, checks and repairs)."""
