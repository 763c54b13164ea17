"""The files of block drafters: `dialects` (names and spellings), `files` (the format), and the draft doctor's checks."""
