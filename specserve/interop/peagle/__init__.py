"""The files of P-EAGLE heads: those of EAGLE-3 with a mask."""
