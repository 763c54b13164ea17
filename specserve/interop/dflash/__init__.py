"""The files of block drafters: `dialects` (keys, spellings), `checks`, `files` (format, repairs)."""
