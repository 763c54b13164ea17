"""The files of block drafters: `catalogue` (keys, faults), `dialects` (spellings), `checks`, `repairs`, `files`."""
