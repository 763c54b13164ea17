"""The files of block drafters: `catalogue` (keys), `dialects` (spellings), `checks`, `files` (format, repairs)."""
