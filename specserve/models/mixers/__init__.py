"""The ways in which the tokens of a layer mix: attention over keys or over latents, of all tokens or of those that an
indexer chooses, and states that recur; and residual streams side by side."""
