"""The files of EAGLE-3 heads: `catalogue` (keys), `dialects` (spellings), `checks`, `files` (format, repairs)."""
