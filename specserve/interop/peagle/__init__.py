"""The files of P-EAGLE heads, EAGLE-3's with a mask: `dialects` (keys, spellings, faults), `files` (format)."""
