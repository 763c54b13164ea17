"""The files of layers of multi-token prediction: `layouts` (names and shapes), `files` (the format), and checks."""
