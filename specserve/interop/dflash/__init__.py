"""The files of block drafters: `dialects` (names and spellings), `files` (the format), `checks` and `repairs`."""
