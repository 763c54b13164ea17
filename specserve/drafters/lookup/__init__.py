"""Drafters without a head: the tokens that followed where the last tokens stood before (`search`)."""
