"""The files of EAGLE-3 heads: `catalogue` (keys, faults), `dialects` (spellings), `checks`, `repairs`, `files`."""
