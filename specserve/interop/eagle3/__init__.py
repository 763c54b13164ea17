"""The files of EAGLE-3 heads: `dialects` (names and spellings), `files` (the format), and the draft doctor's checks."""
