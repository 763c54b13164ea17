"""The files of EAGLE-3 heads: `dialects` (keys, spellings), `checks`, `files` (format, repairs)."""
