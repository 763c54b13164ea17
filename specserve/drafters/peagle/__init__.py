"""P-EAGLE: an EAGLE-3 network that foresees several tokens in one pass, through masked slots."""
