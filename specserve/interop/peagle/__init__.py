"""The files of P-EAGLE heads, EAGLE-3's with a mask: `files` (keys, spellings, format)."""
